from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.device import Options, shaped, summary, table
from bench.measure import Arm
from bench.steps import PHASES
from configs.errors import ConfigError
from configs.schema import RunConfig
from tests.processes import fresh_environment

ROOT = Path(__file__).parents[2]


def arm(step_s: float, train_s: float = 1.0, cosine: float = 1.0, **more: float) -> dict[str, Any]:
    return {"step_s": step_s, "train_s_per_group": train_s, "grad_cosine": cosine} | more


def test_ratios_are_of_the_arms_that_ran() -> None:
    arms = {"unshared": arm(60, 5.0), "serial": arm(12, 1.0, 0.9995), "streamed": arm(10, 1.2, 0.9991)}
    assert summary(arms | {"serial": arm(12, 1.0, 0.9995, hideable_s=4)})["ratios"] == {
        "unshared/serial train": 5.0,
        "unshared/streamed step": 6.0,
        "serial/streamed step": 1.2,
    }
    assert summary({"plain": arm(70)})["ratios"] == {}


def test_the_window_is_held_against_perfect_hiding() -> None:
    arms = {
        "unshared": arm(60),
        "serial": arm(12, hideable_s=4),
        "streamed": arm(10),
        "overlapped+sms64": arm(11, cosine=0.99),
        "streamed+reuse": arm(9),
    }
    found = summary(arms)
    assert found["grad_reference"] == "unshared"
    assert found["grad_cosine_min"] == 0.99
    assert found["windows"] == {
        "streamed": {"gain": 1.2, "bound": 1.5, "share": 0.5},
        "overlapped+sms64": {"gain": 12 / 11, "bound": 1.5, "share": 0.25},
    }, "reuse is compared with serial+reuse alone"
    assert (found["window_gain"], found["window_gain_bound"]) == (1.2, 1.5)
    reused = summary(arms | {"serial+reuse": arm(11, hideable_s=2)})["windows"]["streamed+reuse"]
    assert reused == {"gain": 11 / 9, "bound": 11 / 9, "share": 1.0}


def test_the_shape_on_the_command_line_overrides_the_configs() -> None:
    config = shaped(RunConfig(), groups=3, group_size=4, response=7, long_tail=False)
    assert (config.rl.groups_per_step, config.rl.group_size, config.rollout.max_tokens) == (3, 4, 7)
    kept = shaped(RunConfig(), groups=None, group_size=None, response=None, long_tail=False)
    assert kept == RunConfig()
    assert shaped(RunConfig(), groups=None, group_size=None, response=None, long_tail=True).rollout.max_tokens == 2048


def test_options_that_measure_nothing_are_refused(tmp_path: Path) -> None:
    arms = [Arm.parse("serial")]
    with pytest.raises(ConfigError, match="--warmup"):
        Options(arms=arms, clip=(8, 56, 56), folder=tmp_path, warmup=0)
    with pytest.raises(ConfigError, match="--trace draws a step of the arm overlapped"):
        Options(arms=arms, clip=(8, 56, 56), folder=tmp_path, trace=tmp_path / "trace.json")


def test_table_marks_what_an_arm_lacks() -> None:
    arms = {"unshared": arm(60), "serial": arm(12, mfu=0.4, hideable_s=4)}
    result = {"device": "CPU, torch 2", "shape": {"groups": 2}, "arms": arms} | summary(arms)
    lines = table(result).splitlines()
    assert lines[0:2] == ["CPU, torch 2", "groups 2"]
    assert lines[2].split() == ["unshared", "serial"]
    assert ["mfu", "-", "0.4"] in [line.split() for line in lines]


@pytest.mark.slow
def test_a_small_run_measures_compares_and_draws(tmp_path: Path) -> None:
    words = "--groups 2 --group-size 4 --response 6 --unshared-groups 1 --arms unshared,serial,overlapped --json"
    command = [sys.executable, "run.py", "bench", "device", "configs/bench_tiny.yaml", *words.split()]
    command += ["--out", str(tmp_path), "--trace", str(tmp_path / "trace.json")]
    ran = subprocess.run(command, cwd=ROOT, env=fresh_environment(), capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stderr[-3000:]
    printed = ran.stdout.splitlines()
    assert [line.partition(":")[0] for line in printed if ": step " in line] == ["unshared", "serial", "overlapped"]
    result = json.loads(printed[-1])
    (path,) = (path for path in tmp_path.glob("*.json") if path.name != "trace.json")
    assert path.name.endswith("-cpu-qwen2_5_vl-2x4-p112-r6.json")
    assert json.loads(path.read_text()) == result
    assert path.with_suffix(".png").exists()
    assert (tmp_path / "trace.png").exists()
    arms = result["arms"]
    for name, numbers in arms.items():
        assert list(numbers["phase_s"]) == list(PHASES)
        assert numbers["step_s"] == pytest.approx(sum(numbers["phase_s"].values()))
        assert numbers["tokens_per_s"] == pytest.approx(2 * 4 * (112 + 6) / numbers["step_s"])
        assert numbers["weights_shared_fraction"] == 1.0
        assert numbers["grad_tokens_equal"]
        assert numbers["grad_rel_err"] <= 1e-5
        assert numbers["prefix_forward_s"] > 0
        assert ("scaled_from_groups" in numbers) == (name == "unshared")
        assert (numbers["hidden_s"] > 0) == (name == "overlapped")
    assert arms["unshared"]["scaled_from_groups"] == 1
    assert 0 < arms["serial"]["hideable_s"] <= arms["serial"]["step_s"]
    assert result["grad_cosine_min"] == pytest.approx(1.0)
    assert list(result["windows"]) == ["overlapped"]
    assert list(result["ratios"]) == ["unshared/serial train"]
    assert result["device"].startswith("CPU, torch ")
