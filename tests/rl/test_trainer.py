"""The main loop around a runtime in plain Python: order, stopping, and resuming as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from configs.errors import RunInterrupted
from configs.schema import RunConfig
from data.types import TurnKey
from envs.registration import Episode
from rl.checkpoint import latest_complete, prepare_run_folder
from rl.episodes import EpisodeSource
from rl.signals import StopSignals
from rl.trainer import Trainer, summary_line
from tests.rl.fakes import GO, STAY, FakePolicy, FakePool, FakeRuntime, fake_config


def answer(key: TurnKey, sampling: Any) -> int:
    """Seeded while training, always right in evaluation."""
    return GO if sampling.seed is None else (GO, STAY)[sampling.seed % 2]


def episode_length(episode: Episode) -> int:
    return 1 + episode.seed % 3


def config_for(folder: Path, **changes: Any) -> RunConfig:
    defaults: dict[str, Any] = {
        "rollout": {"deterministic": True},
        "imitation": {"steps": 3, "episodes_per_step": 2},
        "rl": {"group_size": 2, "groups_per_step": 2, "kl_coef": 0.1},
        "steps": 4,
        "save_every": 2,
        "keep_checkpoints": 9,
        "resume": "auto",
    }
    return fake_config(folder, **(defaults | changes))


def run(
    config: RunConfig, runtime: FakeRuntime, prepare: Callable[[Trainer], None] = lambda trainer: None
) -> dict[str, Any]:
    """What `train` does, with the small parts."""
    checkpoint = prepare_run_folder(config)
    with StopSignals() as stop:
        trainer = Trainer(config, make_source(config, runtime, stop), stop)
        trainer.resume(checkpoint)
        prepare(trainer)
        if trainer.imitation_left:
            with trainer.source.teacher():
                trainer.imitate()
        trainer.reinforce()
        return trainer.summarize()


def make_source(config: RunConfig, runtime: FakeRuntime, stop: StopSignals) -> EpisodeSource:
    def pool() -> FakePool:
        return FakePool(3, episode_length)

    return EpisodeSource(config, pool(), FakePolicy(), runtime, lambda: nullcontext(pool()), stop.requested)


def lines(folder: Path) -> list[dict[str, Any]]:
    """Lines of the metrics file without times."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in record.items() if not key.startswith("time/")} for record in records]


def test_the_learning_rate_can_fall_to_the_last_step(tmp_path: Path) -> None:
    runtime = FakeRuntime(answer)
    run(config_for(tmp_path, train={"lr": 0.5, "decay": "linear"}), runtime)
    assert runtime.learning_rates == [1e-3] * 3 + [0.5, 0.375, 0.25, 0.125]


def test_a_run_warms_up_trains_evaluates_and_says_so(tmp_path: Path) -> None:
    runtime = FakeRuntime(answer)
    config = config_for(tmp_path, train={"lr": 0.5, "warmup_steps": 2}, eval_every=3)
    summary = run(config, runtime)
    assert runtime.learning_rates == [1e-3] * 3 + [0.25, 0.5, 0.5, 0.5]
    assert len(runtime.trained) == 3 + 4 * 2
    assert runtime.reference is not None
    places = [(line["phase"], line["step"], "eval/success" in line) for line in lines(tmp_path)]
    assert places == [
        *(("imitation", step, False) for step in (1, 2, 3)),
        ("rl", 0, True),
        *(("rl", step, False) for step in (1, 2, 3)),
        ("rl", 3, True),
        ("rl", 4, False),
        ("rl", 4, True),
    ]
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["imitation_000002", "imitation_000003", "rl_000000", "rl_000002", "rl_000004"]
    assert json.loads((tmp_path / "summary.json").read_text()) == json.loads(json.dumps(summary))
    assert summary["success_before"] == summary["success_after"] == 1.0
    assert summary["steps"] == 4
    assert summary["tokens_trained"] == 40
    assert summary["tokens_naive"] == 200
    assert summary["window_hidden_fraction"] == 0.75
    assert summary["wall_s"] > 0
    assert "held-out success 100.0 % [56.6, 100.0] -> 100.0 % [56.6, 100.0]" in summary_line(summary)
    assert (tmp_path / "config.yaml").is_file()


def test_every_step_reports_the_promised_numbers(tmp_path: Path) -> None:
    run(config_for(tmp_path), FakeRuntime(answer))
    promised = "reward_mean success zero_variance_groups truncated invalid_actions"
    (line,) = [line for line in lines(tmp_path) if line["phase"] == "rl" and line["step"] == 2]
    assert {f"rollout/{name}" for name in promised.split()} <= line.keys()
    assert line["train/kl"] == 1.5
    assert {"train/loss", "train/grad_norm", "tokens/trained", "tokens/naive", "window/hidden_s"} <= line.keys()


def test_several_epochs_learn_from_the_same_groups_again(tmp_path: Path) -> None:
    runtime = FakeRuntime(answer)
    config = config_for(tmp_path, rl={"group_size": 2, "groups_per_step": 2, "epochs": 3}, imitation={}, steps=1)
    run(config, runtime)
    groups = [group for group, _ in runtime.trained]
    assert len(groups) == 6
    assert groups[:2] == groups[2:4] == groups[4:]
    assert len(runtime.learning_rates) == 3
    assert lines(tmp_path)[1]["tokens/trained"] == 30


def test_a_finished_run_may_be_asked_for_fewer_or_more_steps(tmp_path: Path) -> None:
    run(config_for(tmp_path), FakeRuntime(answer))
    shorter = run(config_for(tmp_path, steps=2), FakeRuntime(answer))
    assert shorter["steps"] == 4
    longer = run(config_for(tmp_path, steps=6), FakeRuntime(answer))
    assert longer["steps"] == 6
    assert [line["step"] for line in lines(tmp_path) if line["phase"] == "rl"] == [0, 1, 2, 3, 4, 5, 6, 6]


class Killed(Exception):
    """Stands for a crash at any point."""


@pytest.mark.parametrize("at_poll", [1, 9, 22, 35, 48, 61])
@pytest.mark.parametrize("how", ["crash", "signal"])
def test_a_resumed_run_equals_an_uninterrupted_one(how: str, at_poll: int, tmp_path: Path) -> None:
    whole, first, second = FakeRuntime(answer), FakeRuntime(answer, timing=1), FakeRuntime(answer, timing=2)
    run(config_for(tmp_path / "whole"), whole)
    config = config_for(tmp_path / "cut")

    def interrupt() -> None:
        if first.num_polls == at_poll:
            if how == "crash":
                raise Killed
            os.kill(os.getpid(), signal.SIGTERM)

    first.on_poll = interrupt
    with pytest.raises(Killed if how == "crash" else RunInterrupted) as caught:
        run(config, first)
    assert first.num_polls == at_poll
    if isinstance(caught.value, RunInterrupted):
        assert caught.value.signum == signal.SIGTERM
        assert "resume=auto" in str(caught.value)
        assert latest_complete(tmp_path / "cut") is not None
    run(config, second)
    assert second.weights == whole.weights
    assert second.reference == whole.reference
    assert lines(tmp_path / "cut") == lines(tmp_path / "whole")


def test_a_signal_in_the_warm_start_is_obeyed_too(tmp_path: Path) -> None:
    def stop_soon(trainer: Trainer) -> None:
        train_on = trainer.runtime.train_on

        def train_and_signal(*args: Any) -> None:
            train_on(*args)
            if trainer.progress.step == 1:
                os.kill(os.getpid(), signal.SIGINT)

        trainer.runtime.train_on = train_and_signal  # type: ignore[method-assign, assignment]

    whole, second = FakeRuntime(answer), FakeRuntime(answer)
    run(config_for(tmp_path / "whole"), whole)
    with pytest.raises(RunInterrupted, match="stopped after imitation step 1"):
        run(config_for(tmp_path / "cut"), FakeRuntime(answer), stop_soon)
    run(config_for(tmp_path / "cut"), second)
    assert second.weights == whole.weights
    assert lines(tmp_path / "cut") == lines(tmp_path / "whole")


def test_a_second_signal_leaves_at_once() -> None:
    before = signal.getsignal(signal.SIGINT)  # a job in the background of a shell ignores it
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_ranks_share_the_tasks_and_only_the_first_writes(tmp_path: Path) -> None:
    seeds = {}
    for world_size, rank in ((1, 0), (2, 0), (2, 1)):
        runtime = FakeRuntime(answer)
        runtime.world_size, runtime.rank = world_size, rank
        config = config_for(tmp_path / f"{world_size}-{rank}", imitation={}, steps=1, save_every=0)
        with StopSignals() as stop:
            (tmp_path / f"{world_size}-{rank}").mkdir()
            source = make_source(config, runtime, stop)
            trainer = Trainer(config, source, stop)
            trainer.resume(None)
            for index, task in source._share(source._tasks.next(5)):
                seeds[world_size, rank, index] = task.seed
    assert {index: seed for (world, _, index), seed in seeds.items() if world == 1} == {
        index: seed for (world, _, index), seed in seeds.items() if world == 2
    }
    assert [index for world, rank, index in seeds if (world, rank) == (2, 1)] == [1, 3]
    assert list((tmp_path / "2-1").iterdir()) == []
