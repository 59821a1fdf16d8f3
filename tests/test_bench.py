"""Benchmarks as commands: what they print, and what does not depend on how fast the machine is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import fresh_environment

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_schedules_do_the_same_work_and_sharing_computes_a_quarter_of_the_tokens() -> None:
    command = [sys.executable, "run.py", "bench", "schedules", "configs/bench_tiny.yaml", "--json", "--repeats", "1"]
    result = subprocess.run(command, cwd=ROOT, env=fresh_environment(), capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr[-3000:]
    last = json.loads(result.stdout.splitlines()[-1])
    assert last["shape"]["prompt_tokens"] >= 8 * last["shape"]["response_tokens"]
    assert last["shape"]["group_size"] == 8
    arms = last["arms"]
    assert list(arms) == ["unshared", "serial", "overlapped", "streamed"]
    for arm in ("serial", "overlapped", "streamed"):
        assert arms["unshared"]["train_tokens"] >= 4 * arms[arm]["train_tokens"]
        assert arms[arm]["grad_rel_err"] <= 1e-5
        assert arms[arm]["naive_tokens"] == arms["unshared"]["naive_tokens"]
        assert (arms[arm]["hidden_s"] > 1e-3) == (arm != "serial")
