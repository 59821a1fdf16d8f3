from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import run
from configs.errors import RunInterrupted, UserError
from configs.schema import RunConfig

REPOSITORY = Path(__file__).parents[1]


def run_py(*args: str) -> subprocess.CompletedProcess[str]:
    """`python run.py ...` as a user starts it, from the repository's root."""
    command = [sys.executable, "run.py", *args]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)


def config_file(folder: Path, text: str = "") -> str:
    path = folder / "run.yaml"
    path.write_text(text)
    return str(path)


def test_help_names_every_command_with_its_purpose() -> None:
    result = run_py("--help")
    assert result.returncode == 0
    for command in ("train", "eval", "plan", "doctor", "data", "bench"):
        assert f"    {command} " in result.stdout
    assert result.stderr == ""


@pytest.mark.parametrize("args", [(), ("trian", "x.yaml"), ("train",), ("eval", "x.yaml", "--policy", "best")])
def test_wrong_usage_exits_with_2_and_says_how_it_is_used(args: tuple[str, ...]) -> None:
    result = run_py(*args)
    assert result.returncode == 2
    assert result.stderr.startswith("usage: run.py")


def test_an_override_with_dashes_is_explained(tmp_path: Path) -> None:
    result = run_py("train", config_file(tmp_path), "--rl.group_size=4")
    assert result.returncode == 2
    assert "unknown option --rl.group_size=4; overrides have no dashes: section.field=value" in result.stderr


def test_config_mistakes_exit_with_2_and_one_message_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    """Development case D16: a typo, a number as text, a negative group, a key twice."""
    path = config_file(tmp_path, 'train:\n  lr: "1e-6"\nrl:\n  group_size: -1\n')
    program = (
        "import sys, run; code = run.main(sys.argv[1:]); print({'torch', 'vllm'} & set(sys.modules)); sys.exit(code)"
    )
    command = [sys.executable, "-c", program, "train", path, "rl.kl_coeff=0.1"]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert result.stdout == "set()\n"
    assert sorted(result.stderr.splitlines()) == [
        "command line: rl.kl_coeff: unknown key. Did you mean rl.kl_coef?",
        f"error: {path}, line 4: rl.group_size: -1, expected an integer >= 2.",
    ]


def test_a_duplicate_key_exits_with_2_and_its_line(tmp_path: Path) -> None:
    path = config_file(tmp_path, "rl:\n  epochs: 1\n  epochs: 2\n")
    result = run_py("plan", path)
    assert result.returncode == 2
    assert result.stderr == f"error: {path}, line 3: rl.epochs is given twice, first in line 2; remove one of them.\n"


def test_traceback_is_shown_on_request(tmp_path: Path) -> None:
    result = run_py("train", config_file(tmp_path), "--traceback", "stepz=3")
    assert result.returncode == 1
    assert "Traceback" in result.stderr
    assert "stepz: unknown key. Did you mean steps?" in result.stderr


def test_options_and_overrides_may_come_in_any_order() -> None:
    args = run.parse_arguments(
        ["eval", "a.yaml", "seed=1", "--policy", "expert", "steps=2", "--checkpoint", "c", "seed=3"]
    )
    assert args.config == "a.yaml"
    assert args.overrides == ["seed=1", "steps=2", "seed=3"]
    assert (args.policy, args.checkpoint) == ("expert", "c")


def test_deepspeeds_launcher_may_put_its_rank_first() -> None:
    assert run.parse_arguments(["--local_rank=1", "train", "a.yaml"]).config == "a.yaml"


def test_a_command_gets_the_resolved_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[RunConfig] = []
    monkeypatch.setattr(run, "train", lambda config, args: seen.append(config))
    assert run.main(["train", config_file(tmp_path, "seed: 4\n"), "steps=7"]) == 0
    assert seen == [RunConfig(seed=4, steps=7)]


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UserError("runs/x: not writable"), 2, "error: runs/x: not writable\n"),
        (KeyboardInterrupt(), 130, "interrupted: before a run had begun, so no checkpoint was written\n"),
        (RunInterrupted(signal.SIGTERM, "saved step 4 in runs/x"), 143, "interrupted: saved step 4 in runs/x\n"),
        (RunInterrupted(signal.SIGINT, "saved step 4 in runs/x"), 130, "interrupted: saved step 4 in runs/x\n"),
    ],
)
def test_an_ending_becomes_a_message_and_an_exit_code(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    message: str,
) -> None:
    def fail(config: RunConfig, args: argparse.Namespace) -> None:
        raise error

    monkeypatch.setattr(run, "train", fail)
    assert run.main(["train", config_file(tmp_path)]) == code
    assert capsys.readouterr().err == message


def test_our_own_errors_keep_their_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(config: RunConfig, args: argparse.Namespace) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(run, "train", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        run.main(["train", config_file(tmp_path)])


def test_plan_prints_the_same_peaks_as_json_and_refuses_too_small_a_device(tmp_path: Path) -> None:
    path = config_file(tmp_path)
    table = run_py("plan", path)
    assert table.returncode == 0, table.stderr
    assert [line.split()[0] for line in table.stdout.splitlines()[:2]] == ["buffer", "weights"]
    as_json = run_py("plan", path, "--json", "runtime.hbm_bytes=1000")
    assert as_json.returncode == 2
    assert min(json.loads(as_json.stdout)["peak_bytes"].values()) > 1000
    assert as_json.stderr.splitlines()[-1].startswith('error: phase "rollout" needs ')
    assert "Traceback" not in as_json.stderr


def test_bench_env_measures_the_configs_environment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config_file(tmp_path, "env:\n  options:\n    image_size: 32\n")
    assert run.main(["bench", "env", path, "--seconds", "0.2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["env"] == "rooms"
    assert result["options"] == {"image_size": 32}
    assert result["steps_per_s"] > 0
    assert result["bare"]["steps_per_s"] > 0
    assert result["pool"]["steps_per_s"] > 0
    assert run.main(["bench", "env", path, "--seconds", "0.2", "--json", f"env.python={sys.executable}"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"env", "options", "pool"}


def test_an_environment_that_does_not_exist_is_a_user_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["bench", "env", config_file(tmp_path), "env.id=roooms", "--seconds", "0.2"]) == 2
    assert capsys.readouterr().err.startswith("error: unknown env.id 'roooms': did you mean 'rooms'?")
