"""Whatever happens to a file's bytes, it ends as frames or as a line in the quarantine: no crash, no hang."""

from __future__ import annotations

import random
import time
from pathlib import Path

import numpy as np
import pytest

from data.budget import ClipSpec
from data.decode_pool import DecodePool
from data.video_qa import VideoQARow
from data.video_qa_feed import VideoQAFeed
from tests.data.clips import make_video, steady

NUM_FILES = 500
BOX_NAMES = [b"moov", b"mdat", b"stts", b"stsz", b"stco", b"stsc", b"tkhd", b"mdhd", b"elst", b"avcC", b"stss", b"ctts"]


def corrupt(content: bytes, rng: random.Random) -> bytes:
    """One to three kinds of damage: bits, runs of bytes, cuts, holes, swaps, and wrong numbers in the index."""
    damaged = bytearray(content)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(max(1, len(damaged)))
        length = min(rng.choice([1, 4, 64, 1000]), len(damaged) - at)
        match rng.randrange(7):
            case 0:
                for _ in range(rng.choice([1, 10, 200])):
                    damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
            case 1:
                damaged[at : at + length] = rng.randbytes(length)
            case 2:
                damaged = damaged[: max(1, at)]
            case 3:
                del damaged[at : at + length]
            case 4:
                damaged[at:at] = rng.randbytes(length)
            case 5:
                damaged[at : at + length] = bytes(length)
            case 6:
                name = rng.choice(BOX_NAMES)
                box = damaged.find(name)
                if box >= 4:
                    field = box - 4 + 4 * rng.randrange(12)
                    damaged[field : field + 4] = rng.choice(
                        [b"\xff" * 4, bytes(4), b"\x7f" + b"\xff" * 3, rng.randbytes(4)]
                    )
        if not damaged:
            return b"\x00"
    return bytes(damaged)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_500_damaged_files_each_end_as_frames_or_in_the_quarantine(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (12, 6, 8, 3), np.uint8).repeat(8, axis=1).repeat(8, axis=2)
    whole = [
        make_video(tmp_path / "noise.mp4", steady(12), frames=noise, options={"g": "4", "bf": "2"}),
        make_video(tmp_path / "grey.mp4", steady(20), options={"movflags": "faststart"}),
        make_video(tmp_path / "ten.mp4", steady(8), pix_fmt="yuv420p10le"),
        make_video(tmp_path / "pieces.mp4", steady(30), options={"g": "5", "movflags": "frag_keyframe+empty_moov"}),
    ]
    rng = random.Random(7)
    rows = []
    for place in range(NUM_FILES):
        video = tmp_path / f"damaged{place}.mp4"
        video.write_bytes(corrupt(whole[place % len(whole)].read_bytes(), rng))
        rows.append(VideoQARow(f"q{place}", (video,), (0, "What?"), "x", "exact"))
    rows.append(VideoQARow("whole", (whole[0],), (0, "What?"), "x", "exact"))
    started = time.monotonic()
    spec = ClipSpec(fps=5.0, max_frames=16)
    with DecodePool(spec, workers=2, timeout_s=5.0, cache_dir=None, cache_bytes=0) as pool:
        bad_media = tmp_path / "bad_media.jsonl"
        feed = VideoQAFeed(rows, pool, seed=1, prefetch=16, bad_media=bad_media, max_bad_fraction=1.0)
        shown: dict[str, tuple[int, ...]] = {}
        while feed.state()["next_position"] < len(rows):
            for sample in feed.next(1):
                shown[sample.row.id] = sample.clips[0].frames.shape
    quarantined = [line.split('"')[3] for line in bad_media.read_text().splitlines()]
    assert set(shown) | set(quarantined) == {row.id for row in rows}
    assert not set(shown) & set(quarantined)
    assert len(set(quarantined)) == len(quarantined)
    assert all(frames >= 1 and min(height, width) >= 28 for frames, height, width, _ in shown.values())
    assert "whole" in shown
    assert len(quarantined) > 100
    assert time.monotonic() - started < 120
