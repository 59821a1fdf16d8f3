"""What becomes of episodes, processes and files when a simulator crashes, hangs, dawdles, or loses its client."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest

from configs.errors import ConfigError
from configs.schema import EnvConfig
from envs.pool import EnvPool, EnvResult
from envs.registration import Episode
from envs.server import VERSION
from tests.envs.test_pool import counting

ROOT = Path(__file__).parents[2]
FAKES = "tests.envs.fake_envs"
Record = tuple[float, str, bool, str]


def play(pool: EnvPool, seeds: list[int]) -> dict[int, list[EnvResult]]:
    """Episodes side by side, one a slot, each decision as soon as the last is known: five times "go" ends one."""
    records: dict[int, list[EnvResult]] = {slot: [] for slot in range(len(seeds))}
    for slot, seed in enumerate(seeds):
        pool.reset(slot, Episode(f"e{seed}", seed))
    going = set(records)
    while going:
        for result in pool.poll(1.0):
            records[result.slot].append(result)
            if result.terminated or result.truncated or result.lost:
                going.remove(result.slot)
            else:
                pool.step(result.slot, ["go"])
    return records


def summary(results: list[EnvResult]) -> list[Record]:
    return [(result.reward, result.frame_hash, result.terminated, result.instruction) for result in results]


def undisturbed(seeds: list[int]) -> list[list[Record]]:
    with EnvPool(counting(num_envs=len(seeds))) as pool:
        records = play(pool, seeds)
    return [summary(records[slot]) for slot in range(len(seeds))]


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("fault", ["segfault", "die", "exit", "raise", "hang", "hang-in-c"])
def test_a_fault_changes_no_record(fault: str, workers: int, tmp_path: Path) -> None:
    # Long enough that a loaded machine restarts nothing by itself; only a hang is ever waited for.
    config = counting(num_envs=3, workers=workers, step_timeout_s=4.0, fault=fault, marks=str(tmp_path))
    with EnvPool(config) as pool:
        records = play(pool, [5, 6, 7])
        assert (pool.num_restarts, pool.num_lost) == (1, 0)
    assert [summary(records[slot]) for slot in range(3)] == undisturbed([5, 6, 7])
    assert all(len(results) == 6 for results in records.values())


def test_a_slow_environment_is_waited_for(tmp_path: Path) -> None:
    with EnvPool(counting(fault="slow", marks=str(tmp_path), step_timeout_s=2.0)) as pool:
        records = play(pool, [5, 6])
        assert pool.num_restarts == 0
    assert [summary(records[slot]) for slot in range(2)] == undisturbed([5, 6])


def test_after_max_restarts_the_episode_is_lost_and_others_are_not(tmp_path: Path) -> None:
    config = counting(num_envs=2, fault="die", marks=str(tmp_path), times=3)
    with EnvPool(EnvConfig(**{**vars(config), "max_restarts": 2})) as pool:
        for slot, seed in enumerate((5, 6)):
            pool.reset(slot, Episode(f"e{seed}", seed))
        pool.wait([0, 1])
        pool.step(0, ["go", "go"])  # dies in each of the three attempts
        pool.step(1, ["go"])
        lost, other = pool.wait([0, 1])
        assert "slot 0, episode 'e5' (seed 5, train), actions ['go', 'go']: was killed by SIGKILL" in lost.lost
        assert math.isnan(lost.reward)
        assert (lost.terminated, lost.truncated, lost.info, lost.expert) == (False, False, {}, ())
        assert (other.lost, other.reward) == ("", 1.0)
        assert (pool.num_restarts, pool.num_lost) == (3, 1)
        with pytest.raises(ValueError, match="its episode is over"):
            pool.step(0, ["go"])
        assert [summary(results) for results in play(pool, [8, 9]).values()] == undisturbed([8, 9])


@pytest.mark.parametrize("fault", ["raise", "die"])
def test_a_fault_at_every_attempt_loses_the_episode_with_its_reason(fault: str) -> None:
    with EnvPool(EnvConfig(**{**vars(counting(fault=fault)), "max_restarts": 1})) as pool:
        records = play(pool, [1])
        assert len(records[0]) == 3  # the reset, a "go", and the one that is lost
        assert {"raise": "KeyError: 'left wheel'", "die": "SIGKILL"}[fault] in records[0][-1].lost
        assert pool.num_restarts == 2


def test_a_reset_that_raises_loses_the_episode() -> None:
    with EnvPool(EnvConfig(**{**vars(counting(fault="reset-raise")), "max_restarts": 0})) as pool:
        pool.reset(0, Episode("a", seed=3))
        (result,) = pool.wait([0])
        assert "the scene is missing" in result.lost


def test_an_idle_process_killed_from_outside_is_replaced() -> None:
    with EnvPool(counting()) as pool:
        pool.reset(0, Episode("a", seed=1))
        (first,) = pool.wait([0])
        os.kill(first.info["pid"], signal.SIGKILL)
        pool.step(0, ["go"])
        (result,) = pool.wait([0])
        assert result.info["pid"] != first.info["pid"]
        assert (result.reward, result.lost) == (1.0, "")


def test_a_slot_reset_while_its_old_episode_is_replayed_shows_the_new_one() -> None:
    with EnvPool(counting()) as pool:
        pool.reset(0, Episode("a", seed=1))
        pool.reset(1, Episode("b", seed=2))
        pid = pool.wait([0, 1])[0].info["pid"]
        os.kill(pid, signal.SIGKILL)
        pool.step(1, ["go"])
        while not pool.num_restarts or any(not worker.tasks for worker in pool._workers):
            assert pool.poll(0.01) == [] or pool.num_restarts
        pool.reset(0, Episode("c", seed=3))
        (result,) = pool.wait([0])
        assert "in train" in result.instruction
        assert summary([result]) == undisturbed([3])[0][:1]


def test_a_world_that_does_not_follow_its_seed_is_lost_when_it_is_replayed() -> None:
    with EnvPool(EnvConfig(id=f"{FAKES}:AnotherWorldEachTime", num_envs=1)) as pool:
        pool.reset(0, Episode("a", seed=1))
        (first,) = pool.wait([0])
        os.kill(first.info["pid"], signal.SIGKILL)
        pool.step(0, ["go"])
        (result,) = pool.wait([0])
        assert "the reset showed other frames" in result.lost


def test_an_interpreter_that_is_none_is_named() -> None:
    with pytest.raises(ConfigError, match=r"env.python '/nowhere/python' cannot be started"):
        EnvPool(EnvConfig(python="/nowhere/python"))


OWNER = """
import sys, time
from configs.schema import EnvConfig
from envs.pool import EnvPool
from envs.registration import Episode
options = {"fault": sys.argv[1], "helper": True}
pool = EnvPool(EnvConfig(id="tests.envs.fake_envs:CountingEnv", address=sys.argv[2], options=options))
pool.reset(0, Episode("a", seed=1))
info = pool.wait([0])[0].info
pool.step(0, ["go", "go"])
print(info["pid"], info["helper"], flush=True)
time.sleep(60)
"""


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("fault", ["hang", "hang-in-c", ""])
def test_processes_end_when_their_owner_is_killed(fault: str) -> None:
    owner, started = owning(fault)
    owner.kill()
    owner.wait()
    until_gone(started)


def owning(fault: str, address: str = "") -> tuple[subprocess.Popen[str], list[int]]:
    """A process with a pool whose environment misbehaves by now, and what was started: its process and its helper."""
    command = [sys.executable, "-c", OWNER, fault, address]
    owner = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    with owner.stdout:
        started = [int(pid) for pid in owner.stdout.readline().split()]
    assert len(started) == 2
    time.sleep(0.1)
    return owner, started


def until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 5
    while not all(map(is_gone, pids)):
        assert time.monotonic() < deadline, "a process outlived its owner"
        time.sleep(0.02)


@contextlib.contextmanager
def listening() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server of counting environments on TCP, started far from the repository, and its address."""
    command = [sys.executable, str(ROOT / "envs/server.py"), "--listen", "0", "--env", f"{FAKES}:CountingEnv"]
    listener = subprocess.Popen(command, cwd="/", stderr=subprocess.PIPE, text=True)
    assert listener.stderr is not None
    with listener.stderr:
        try:
            yield listener, listener.stderr.readline().split()[-1]
        finally:
            listener.kill()
            listener.wait()


@pytest.mark.parametrize("first", ["listener", "owner"])
def test_a_hanging_environment_on_tcp_ends_when_both_sides_are_killed(first: str) -> None:
    with listening() as (listener, address):
        owner, started = owning("hang-in-c", address)
        for process in (listener, owner) if first == "listener" else (owner, listener):
            process.kill()
            process.wait()
            time.sleep(0.1)
        until_gone(started)


def test_a_client_on_tcp_chooses_no_code(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/__init__.py").write_text("open('/dev/stderr', 'w').write('not mine'); raise SystemExit")
    with listening() as (_, address):
        host, _, port = address.rpartition(":")
        assert host == "127.0.0.1"
        with socket.create_connection((host, int(port))) as client:
            setup = {"version": VERSION, "env": "x", "options": {}, "slots": [0], "paths": [str(tmp_path)]}
            client.sendall(msgpack.packb(["init", setup]))
            assert msgpack.unpackb(client.recv(1 << 16))[0] == "ready"


def test_what_is_no_environment_server_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"

        def answer() -> None:
            with other.accept()[0] as connection:
                connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n")
                connection.recv(1)  # until the client hangs up

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ConfigError, match=f"env.address '{address}': what answers there is no environment server"):
            EnvPool(EnvConfig(address=address))
        thread.join()


@pytest.mark.parametrize(
    ("config", "message"),
    [(EnvConfig(id="romms"), "did you mean 'rooms'"), (EnvConfig(options={"num_rooms": 2**70}), "env.options")],
)
def test_what_cannot_be_asked_for_starts_nothing(config: EnvConfig, message: str) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ConfigError, match=message):
        EnvPool(config)
    assert os.listdir("/proc/self/fd") == before


def test_a_port_that_is_none_is_named() -> None:
    command = [sys.executable, str(ROOT / "envs/server.py"), "--listen", "99999", "--env", "a:B"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert "'99999' names no port: give HOST:PORT" in result.stderr


def test_a_server_on_tcp_serves_its_one_environment_and_ends_with_its_clients() -> None:
    with listening() as (_, address):
        with EnvPool(EnvConfig(id=f"{FAKES}:NotAnEnv", address=address, num_envs=2, workers=2)) as pool:
            records = play(pool, [5, 6])
            pids = [results[0].info["pid"] for results in records.values()]
            os.kill(pids[0], signal.SIGKILL)
            pool.reset(0, Episode("a", seed=7))
            assert pool.wait([0])[0].info["pid"] not in pids
        assert [summary(results) for results in records.values()] == undisturbed([5, 6])
        until_gone(pids)
    with pytest.raises(ConfigError, match=r"env.address '127.0.0.1:\d+'.*--listen"):
        EnvPool(EnvConfig(address=address))


@pytest.mark.parametrize("version", ["3.9", "3.10", "3.12", "3.13"])
def test_the_server_runs_under_other_pythons(version: str) -> None:
    python = other_python(version)
    with EnvPool(EnvConfig(**{**vars(counting(num_envs=2)), "python": python})) as pool:
        records = play(pool, [5, 6])
    assert [summary(results) for results in records.values()] == undisturbed([5, 6])


def other_python(version: str) -> str:
    """An interpreter with numpy and msgpack: of ROLLPLEX_TEST_PYTHONS (separated by colons), or by its usual name."""
    named = [path for path in os.environ.get("ROLLPLEX_TEST_PYTHONS", "").split(":") if path]
    for path in (*named, f"python{version}"):
        code = "import sys, numpy, msgpack; print('%d.%d' % sys.version_info[:2])"
        with contextlib.suppress(FileNotFoundError):
            answer = subprocess.run([path, "-c", code], capture_output=True, text=True)
            if answer.stdout.strip() == version:
                return shutil.which(path) or path
    pytest.skip(f"no Python {version} with numpy and msgpack: name one in ROLLPLEX_TEST_PYTHONS")


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(20))
def test_crashes_and_hangs_twenty_times_in_a_row(attempt: int, tmp_path: Path) -> None:
    for number, fault in enumerate(("segfault", "hang")):
        marks = tmp_path / fault
        marks.mkdir()
        config = counting(num_envs=4, workers=2, step_timeout_s=0.4, fault=fault, marks=str(marks), times=2)
        with EnvPool(config) as pool:
            seeds = [attempt * 10 + number + place for place in range(4)]
            records = play(pool, seeds)
            assert pool.num_lost == 0
        assert [summary(records[slot]) for slot in range(4)] == undisturbed(seeds)
