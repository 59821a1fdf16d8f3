"""What `make`, the pins and the shim promise, as far as it can be checked without installing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


def make(*args: str) -> subprocess.CompletedProcess[str]:
    """GNU make in the repository's root, without what an outer make hands down."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(["make", *args], cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=60)


@pytest.fixture
def installed(tmp_path: Path) -> str:
    """A VENV= argument for a folder in which make finds everything installed."""
    (tmp_path / ".installed-cpu").touch()
    return f"VENV={tmp_path}"


def test_make_demo_runs_the_main_job_with_the_seed(installed: str) -> None:
    result = make("-n", "demo", installed, "SEED=3")
    assert result.returncode == 0
    assert "run.py train configs/demo.yaml run_dir=runs/demo seed=3" in result.stdout
    assert "pip install" not in result.stdout


@pytest.mark.parametrize(
    ("target", "selection"), [("check", "-m 'not slow and not gpu and not multigpu'"), ("test", "")]
)
def test_make_check_and_test_run_the_same_tools(installed: str, target: str, selection: str) -> None:
    lines = make("-n", target, installed).stdout.splitlines()
    tools = [line.replace(installed.removeprefix("VENV="), "").removeprefix("/bin/").strip() for line in lines]
    assert tools == ["ruff format --check .", "ruff check .", "mypy", "lint-imports", f"pytest {selection}".strip()]


def test_an_install_is_repeated_only_when_the_pins_are_newer(installed: str) -> None:
    assert make("-q", "install", installed).returncode == 0
    stamp = Path(installed.removeprefix("VENV=")) / ".installed-cpu"
    os.utime(stamp, (0, 0))
    assert make("-q", "install", installed).returncode == 1


def test_an_install_takes_its_versions_from_the_constraints(tmp_path: Path) -> None:
    recipe = make("-n", "install", f"VENV={tmp_path}/new").stdout
    assert (
        "--constraint constraints/cpu.txt --editable '.[cpu,sim,dev]' ./tools/torchvision-cpu-shim"
        in recipe.replace("\\\n\t", "")
    )


def test_make_says_what_is_missing(tmp_path: Path) -> None:
    no_python = make("install", "PYTHON=", f"VENV={tmp_path}/new")
    assert no_python.returncode != 0
    assert "Rollplex needs Python 3.11 or newer; none found" in no_python.stderr
    no_venv = make("install", "PYTHON=false", f"VENV={tmp_path}/new")
    assert no_venv.returncode != 0
    assert "apt-get install python3-venv" in no_venv.stderr


def test_ci_runs_make_test() -> None:
    script = REPOSITORY / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text().rstrip().endswith("exec make test")


@pytest.mark.parametrize("extra", ["cpu", "gpu"])
def test_every_requirement_is_pinned_and_agrees_with_the_constraints(extra: str) -> None:
    lines = (REPOSITORY / "constraints" / f"{extra}.txt").read_text().splitlines()
    constraints = dict(_normal(line).split("==") for line in lines if not line.startswith("#"))
    extras = PROJECT["optional-dependencies"]
    for requirement in [*PROJECT["dependencies"], *extras[extra], *extras["dev"]]:
        name, pin = _normal(requirement).split("==")
        assert constraints[name] == pin


def _normal(requirement: str) -> str:
    return requirement.lower().replace("_", "-")


@pytest.mark.parametrize(
    "name", ["pyproject.toml", "constraints/cpu.txt", "constraints/gpu.txt", "Makefile", "README.md"]
)
def test_no_package_index_is_named(name: str) -> None:
    text = (REPOSITORY / name).read_text()
    assert not re.search(r"https?://|index-url|pypi\.|download\.pytorch", text)


@pytest.mark.skipif(not version("torch").endswith("+cpu"), reason="the shim acts beside a CPU build of torch only")
def test_the_shim_makes_torchvision_importable_and_hides_what_cannot_load() -> None:
    program = """
import importlib.util
import torchvision.transforms.v2
for name in ("torchaudio", "torchcodec"):
    try:
        __import__(name)
    except ImportError:
        print(name, "is absent")
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["torchaudio is absent", "torchcodec is absent"]
