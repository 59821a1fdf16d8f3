"""`run.py eval` from the command line where no model is needed: baselines, their comparison, and wrong use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import run


def evaluated(tmp_path: Path, policy: str, capsys: pytest.CaptureFixture[str], *words: str) -> Path:
    config = tmp_path / "run.yaml"
    config.write_text(f"run_dir: {tmp_path / 'run'}\nenv: {{num_envs: 4, options: {{num_rooms: 1, image_size: 16}}}}\n")
    assert run.main(["eval", "--policy", policy, str(config), "eval.episodes=6", *words]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["lost"] == 0
    return Path(printed["results"])


def test_expert_and_random_are_measured_recorded_and_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expert, chance = (evaluated(tmp_path, policy, capsys) for policy in ("expert", "random"))
    content = json.loads(expert.read_text())
    assert content["success"] == 1.0
    assert len(content["success_ci95"]) == 2
    assert sum(row["count"] for row in content["tables"]["by_task"].values()) == 6
    assert len(list((expert.parent / "videos").glob("*.mp4"))) == 6  # one an episode
    first = expert.read_bytes()
    assert evaluated(tmp_path, "expert", capsys).read_bytes() == first
    assert run.main(["eval", "--compare", str(chance.parent), str(expert)]) == 0
    found = json.loads(capsys.readouterr().out)
    won = found["only_b"]
    assert (found["episodes"], found["only_a"]) == (6, 0)
    assert won >= 4
    assert found["p_value"] == pytest.approx(min(1.0, 2 / 2**won))


def test_as_many_episodes_become_videos_as_the_config_or_the_option_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def written(*words: str) -> list[str]:
        results = evaluated(tmp_path, "expert", capsys, *words)
        return sorted(path.name for path in (results.parent / "videos").glob("*.mp4"))

    assert written("eval.videos=2") == ["episode_000.mp4", "episode_001.mp4"]
    assert written("eval.videos=2", "--videos", "1") == ["episode_000.mp4"]
    assert written("eval.videos=0") == []


def test_eval_needs_a_config_or_two_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        run.main(["eval"])
    assert exit_.value.code == 2
    assert "needs a CONFIG, or --compare A B" in capsys.readouterr().err
    assert run.main(["eval", "--compare", str(tmp_path), str(tmp_path)]) == 2
    assert "is no results.json" in capsys.readouterr().err
