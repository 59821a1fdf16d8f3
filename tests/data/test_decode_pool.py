"""Decoding in other processes: order does not matter, nothing hangs or crashes the caller, the cache keeps its size."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.errors import UserError
from data.budget import ClipSpec
from data.decode import decode
from data.decode_pool import DecodePool
from data.frame_cache import FrameCache, make_spool, read_frames, write_frames
from data.video_index import BadMedia
from tests.data.clips import make_video, steady

SPEC = ClipSpec(fps=5.0)


@pytest.fixture
def videos(tmp_path: Path) -> list[Path]:
    return [make_video(tmp_path / f"{place}.mp4", steady(5 + place)) for place in range(5)]


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[DecodePool]:
    with make_pool(tmp_path) as made:
        yield made


def make_pool(folder: Path, **settings: Any) -> DecodePool:
    chosen: dict[str, Any] = {"workers": 2, "timeout_s": 30.0, "cache_dir": None, "cache_bytes": 0} | settings
    return DecodePool(SPEC, **chosen)


def test_clips_come_back_by_ticket_and_equal_those_decoded_here(pool: DecodePool, videos: list[Path]) -> None:
    tickets = [pool.submit(video) for video in videos]
    for video, ticket in reversed(list(zip(videos, tickets, strict=True))):
        clip, here = pool.result(ticket), decode(video, SPEC)
        assert np.array_equal(clip.frames, here.frames)
        assert (clip.times_s, clip.plan, clip.fps, clip.decoder) == (here.times_s, here.plan, here.fps, here.decoder)
    assert pool.num_decoded == 5


def test_a_clip_has_the_tokens_its_row_leaves(pool: DecodePool, videos: list[Path]) -> None:
    clip = pool.result(pool.submit(videos[4], max_tokens=4))
    assert clip.plan.num_tokens <= 4
    assert "reduced" in clip.plan.notes[-1]


def test_bad_files_are_reported_with_their_reason(pool: DecodePool, tmp_path: Path) -> None:
    (tmp_path / "bad.mp4").write_bytes(b"no video")
    tickets = [pool.submit(tmp_path / name) for name in ("bad.mp4", "nowhere.mp4")]
    for ticket, reason in zip(tickets, ("cannot be read", "no such file"), strict=True):
        with pytest.raises(BadMedia, match=reason):
            pool.result(ticket)


@pytest.fixture
def odd_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data.decode_pool.WORKER", "tests.data.odd_worker:make_handler")


@pytest.mark.usefixtures("odd_workers")
@pytest.mark.parametrize(
    ("name", "reason"),
    [("hang", r"took longer than 1\.5 s"), ("crash", "crashed: its process ended with signal SIGABRT")],
)
def test_a_clip_that_hangs_or_crashes_is_bad_and_those_behind_it_are_decoded(
    tmp_path: Path, videos: list[Path], name: str, reason: str
) -> None:
    with make_pool(tmp_path, workers=1, timeout_s=1.5) as pool:
        tickets = [pool.submit(video) for video in [tmp_path / f"{name}.mp4", *videos]]
        with pytest.raises(BadMedia, match=reason):
            pool.result(tickets[0])
        assert [len(pool.result(ticket).frames) for ticket in tickets[1:]] == [3, 3, 4, 4, 5]


@pytest.mark.usefixtures("odd_workers")
@pytest.mark.parametrize("name", ["hang_first", "crash_first"])
def test_a_clip_on_which_a_worker_fails_once_is_decoded_with_pyav(
    tmp_path: Path, videos: list[Path], name: str
) -> None:
    video = videos[0].rename(tmp_path / f"{name}.mp4")
    with make_pool(tmp_path, timeout_s=1.5) as pool:
        clip = pool.result(pool.submit(video))
    assert clip.decoder == "pyav"
    assert np.array_equal(clip.frames, decode(video, SPEC).frames)


def test_a_worker_killed_from_outside_is_replaced(pool: DecodePool, videos: list[Path]) -> None:
    while not all(worker.is_ready for worker in pool._workers):
        pool.poll(0.1)
    for worker in pool._workers:
        os.kill(worker.child.process.pid, signal.SIGKILL)
    assert [len(pool.result(pool.submit(video)).frames) for video in videos] == [3, 3, 4, 4, 5]


def test_a_clip_is_decoded_once_and_then_comes_from_the_cache(tmp_path: Path, videos: list[Path]) -> None:
    cache = tmp_path / "cache"
    for expected in ((5, 0), (0, 5)):
        with make_pool(tmp_path, cache_dir=cache, cache_bytes=1 << 30) as pool:
            clips = [pool.result(ticket) for ticket in [pool.submit(video) for video in videos]]
            assert (pool.num_decoded, pool.num_cached) == expected
        for clip, video in zip(clips, videos, strict=True):
            assert np.array_equal(clip.frames, decode(video, SPEC).frames)
    assert len(list(cache.glob("*.npz"))) == 5
    assert list(cache.glob("spool-*")) == []
    os.rename(videos[0], tmp_path / "renamed.mp4")
    videos[1].write_bytes(videos[2].read_bytes())
    with make_pool(tmp_path, cache_dir=cache, cache_bytes=1 << 30) as pool:
        assert len(pool.result(pool.submit(tmp_path / "renamed.mp4")).frames) == 3
        assert np.array_equal(pool.result(pool.submit(videos[1])).frames, clips[2].frames)  # by content, not by name
        assert pool.num_cached == 2


def test_a_damaged_cache_file_is_decoded_again(tmp_path: Path, videos: list[Path]) -> None:
    for _ in range(2):
        with make_pool(tmp_path, cache_dir=tmp_path / "cache", cache_bytes=1 << 30) as pool:
            assert len(pool.result(pool.submit(videos[0])).frames) == 3
            assert pool.num_decoded == 1
        for file in (tmp_path / "cache").glob("*.npz"):
            file.write_bytes(file.read_bytes()[:100])


def test_the_least_used_go_when_the_cache_is_full(tmp_path: Path) -> None:
    frames = np.zeros((1, 10, 10, 3), np.uint8)
    write_frames(tmp_path / "one", frames, {"a": 1})
    size = (tmp_path / "one").stat().st_size
    cache = FrameCache(tmp_path / "cache", limit_bytes=int(3.5 * size))
    for place, key in enumerate("abc"):
        cache.put(key, _copy(tmp_path, key))
        os.utime(tmp_path / "cache" / f"{key}.npz", (place, place))
    assert cache.take("a", tmp_path / "taken")
    cache.put("d", _copy(tmp_path, "d"))
    assert sorted(file.stem for file in (tmp_path / "cache").iterdir()) == ["a", "c", "d"]
    assert read_frames(tmp_path / "taken")[1] == {"a": 1}
    cache.put("e", _copy(tmp_path, "e"))
    assert sum(file.stat().st_size for file in (tmp_path / "cache").iterdir()) <= 3.5 * size
    assert read_frames(tmp_path / "taken")[1] == {"a": 1}  # whoever took it may still read it


def _copy(folder: Path, name: str) -> Path:
    (folder / name).write_bytes((folder / "one").read_bytes())
    return folder / name


def test_a_frame_file_larger_than_the_limit_is_not_kept(tmp_path: Path) -> None:
    write_frames(tmp_path / "one", np.zeros((1, 10, 10, 3), np.uint8), {})
    FrameCache(tmp_path / "cache", limit_bytes=10).put("a", tmp_path / "one")
    assert list((tmp_path / "cache").iterdir()) == []


def test_spools_of_killed_processes_are_removed(tmp_path: Path) -> None:
    (tmp_path / "spool-4194303-x").mkdir()
    mine = make_spool(tmp_path)
    assert list(tmp_path.iterdir()) == [mine]
    assert make_spool(tmp_path) != mine
    assert mine.is_dir()


def test_a_budget_that_nothing_fits_is_a_reason_with_a_remedy(tmp_path: Path, videos: list[Path]) -> None:
    spec = ClipSpec(min_pixels=56 * 56)
    with DecodePool(spec, workers=1, timeout_s=30.0, cache_dir=None, cache_bytes=0) as pool:
        ticket = pool.submit(videos[0], max_tokens=1)
        with pytest.raises(BadMedia, match=r"need 4 tokens; .* Raise data\.max_video_tokens"):
            pool.result(ticket)


def test_a_full_disk_stops_the_run_and_blames_no_video(tmp_path: Path, videos: list[Path]) -> None:
    with make_pool(tmp_path, workers=1) as pool:
        pool._spool.rmdir()  # nothing can be written there any more
        ticket = pool.submit(videos[0])
        with pytest.raises(UserError, match=r"cannot write decoded frames .*data\.cache_dir"):
            pool.result(ticket)


def _cpu_s(pool: DecodePool) -> float:
    """Processor time of a pool's workers so far (s)."""
    fields = [Path(f"/proc/{worker.child.process.pid}/stat").read_text().split() for worker in pool._workers]
    return sum(int(user) + int(system) for user, system in (field[13:15] for field in fields)) / os.sysconf(
        "SC_CLK_TCK"
    )


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads processor times from /proc")
def test_two_workers_decode_at_least_1_6_times_as_much_as_one(tmp_path: Path) -> None:
    """In processor time, which other programs on the machine hardly change: a second worker halves what each does.

    What two workers and this process need for a clip, on cores of their own, against what one needs.
    """
    noise = np.random.default_rng(0).integers(0, 255, (60, 45, 80, 3), np.uint8).repeat(8, axis=1).repeat(8, axis=2)
    video = make_video(tmp_path / "a.mp4", steady(60, 30.0), width=640, height=360, frames=noise)
    num_clips, worker_s, here_s = 12, {1: 1e9, 2: 1e9}, {1: 1e9, 2: 1e9}
    pools = {workers: make_pool(tmp_path, workers=workers) for workers in (1, 2)}
    try:
        for _ in range(4):
            for workers, pool in pools.items():
                before, here = _cpu_s(pool), time.process_time()
                for ticket in [pool.submit(video) for _ in range(num_clips)]:
                    pool.result(ticket)
                worker_s[workers] = min(worker_s[workers], (_cpu_s(pool) - before) / num_clips)
                here_s[workers] = min(here_s[workers], (time.process_time() - here) / num_clips)
    finally:
        for pool in pools.values():
            pool.close()
    assert worker_s[1] / max(worker_s[2] / 2, here_s[2]) >= 1.6, (worker_s, here_s)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_whole_group_ends_no_worker(pool: DecodePool, videos: list[Path], signum: int) -> None:
    while not all(worker.is_ready for worker in pool._workers):
        pool.poll(wait_s=0.1)
    for worker in pool._workers:
        os.kill(worker.child.process.pid, signum)
    assert [len(pool.result(pool.submit(video)).frames) for video in videos[1:]] == [3, 4, 4, 5]
    assert all(worker.child.process.poll() is None for worker in pool._workers)


def test_clips_whose_answers_died_with_the_worker_are_not_blamed(tmp_path: Path, videos: list[Path]) -> None:
    """The frames were there already, taken from the cache, when the worker was killed and its pipe with it."""
    settings: dict[str, Any] = {"workers": 1, "cache_dir": tmp_path / "frames", "cache_bytes": 1 << 20}
    with make_pool(tmp_path, **settings) as pool:
        for video in videos:
            pool.result(pool.submit(video))
        tickets = [pool.submit(video) for video in videos]
        deadline = time.monotonic() + 30
        while not all(pool._open[ticket].target.exists() for ticket in tickets) and time.monotonic() < deadline:
            time.sleep(0.01)
        worker = pool._workers[0].child
        worker.process.kill()
        worker.process.wait()
        while worker.pipe.poll():  # what it had answered is lost
            try:
                worker.pipe.recv()
            except EOFError:
                break
        for video, ticket in zip(videos, tickets, strict=True):
            assert np.array_equal(pool.result(ticket).frames, decode(video, SPEC).frames)
