from __future__ import annotations

import pytest
import torch

from bench.measure import Arm, DeviceMemory, hideable_s, job_seconds, scaled, serial_hideable_s
from bench.steps import Step
from configs.errors import ConfigError


def test_an_arm_is_a_schedule_with_settings() -> None:
    assert Arm.parse("plain") == Arm("plain", "unshared", "plain")
    assert Arm.parse("serial") == Arm("serial", "serial", "fused")
    assert Arm.parse("streamed+reuse+sms64") == Arm("streamed+reuse+sms64", "streamed", reuse=True, window_sms=64)
    assert [Arm.parse(name).share for name in ("plain", "unshared", "serial")] == [False, False, True]


@pytest.mark.parametrize("name", ["streemed", "serial+sms8", "unshared+reuse", "plain+reuse", "streamed+smsx", ""])
def test_an_arm_that_cannot_be_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="--arms"):
        Arm.parse(name)


def test_only_training_is_scaled_to_more_groups() -> None:
    phases = {"rollout": 2.0, "score": 1.0, "train": 3.0, "optimizer": 0.5, "publish": 0.1}
    assert scaled(phases, 4) == {"rollout": 2.0, "score": 4.0, "train": 12.0, "optimizer": 0.5, "publish": 0.1}


def test_what_is_known_at_once_hides_until_the_end() -> None:
    assert hideable_s(3.0, [], 10.0) == 3.0
    assert hideable_s(30.0, [], 10.0) == 10.0


def test_what_is_known_later_hides_from_then_on() -> None:
    # 2 s at once, done at 2; 3 s more from 5, done at 8; 4 s more from 9, of which one fits.
    assert hideable_s(2.0, [(9.0, 4.0), (5.0, 3.0)], 10.0) == 2 + 3 + 1
    # What was not done before waits for its turn.
    assert hideable_s(8.0, [(5.0, 3.0)], 10.0) == 10.0
    assert hideable_s(2.0, [(10.0, 4.0)], 10.0) == 2.0, "what is known at the end hides nothing"


def test_a_serial_step_hides_its_prompts_and_the_groups_that_end_early() -> None:
    step = Step({"rollout": 10.0}, {0: 4.0, 1: 10.0}, {}, {})
    # Prompts of 1 s a group, the rest 2 s a group: 2 s at once, and the 2 s of the group that ends at 4.
    assert serial_hideable_s(step, group_s=3.0, prefix_s=1.0) == 4.0


def test_job_times_add_up_over_places() -> None:
    job_s = {"beside/train": 1.0, "after/train": 2.0, "after/reference_score": 4.0, "rollout/vision": 8.0}
    assert sum(job_seconds(job_s, "train")) == 3.0
    assert sum(job_seconds(job_s, "train", "reference_score")) == 7.0


def test_memory_has_no_numbers_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    memory = DeviceMemory()
    memory.begin()
    memory.sample()
    assert memory.peaks() == {}
