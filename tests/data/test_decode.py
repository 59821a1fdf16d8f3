"""Frames by presentation time, upright, the same from both decoders; unusable files with their reason."""

from __future__ import annotations

import dataclasses
import os
from fractions import Fraction
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from data.budget import ClipSpec
from data.decode import Decoder, clip_key, decode, frame_at
from data.video_index import BadMedia, content_hash, probe
from tests.data.clips import (
    CLOCK,
    MIRROR,
    NUMBERED_SIZE,
    QUARTER_TURN,
    grey_at,
    make_video,
    numbered_frames,
    numbers_of,
    red_on_top,
    set_display_matrix,
    set_edit_list,
    steady,
)

SPEC = ClipSpec(fps=10.0, min_pixels=28 * 28, max_pixels=224 * 224)


def shown_times(frames: np.ndarray) -> np.ndarray:
    """The times that the frames' grey tells (s)."""
    return (frames.mean((1, 2, 3)) - 20) / 40


def test_frames_follow_time_where_the_rate_varies(tmp_path: Path) -> None:
    """Development case D04: 1 s at 30 fps, then 4 s at 5 fps."""
    times = [place / 30 for place in range(30)] + [1 + place / 5 for place in range(20)]
    path = make_video(tmp_path / "vfr.mp4", times)
    clip = decode(path, dataclasses.replace(SPEC, fps=1.0))
    assert np.abs(shown_times(clip.frames) - [0, 1, 2, 3, 4]).max() <= 0.06
    assert clip.times_s == pytest.approx([0, 1, 2, 3, 4], abs=1e-3)
    assert clip.duration_s == pytest.approx(5.0, abs=0.2)
    assert clip.fps == 1.0


@pytest.mark.parametrize("num_frames", [3, 7, 12, 40])
@pytest.mark.parametrize("decoder", ["decord", "pyav"])
def test_every_sample_shows_the_frame_on_screen(tmp_path: Path, num_frames: int, decoder: Decoder) -> None:
    times = [0, 0.1, 0.4, 0.5, 1.5, 1.6, 1.7, 3.0, 3.1, 3.9, 4.4, 4.5]
    path = make_video(tmp_path / "a.mp4", times, options={"g": "4"})
    clip = decode(path, dataclasses.replace(SPEC, num_frames=num_frames), decoder)
    samples = [place * clip.duration_s / len(clip.frames) for place in range(len(clip.frames))]
    expected = [max(time for time in times if time <= sample + 1e-3) for sample in samples]
    assert clip.times_s == pytest.approx(expected, abs=1e-3)
    assert np.abs(shown_times(clip.frames) - expected).max() <= 0.06


@pytest.mark.parametrize("degrees", [90, 180, 270])
def test_turned_videos_come_out_upright_from_both_decoders(tmp_path: Path, degrees: int) -> None:
    """Development case D05: stored 320 x 180 for a quarter turn, shown 180 x 320."""
    upright = red_on_top(320, 180) if degrees != 180 else red_on_top(180, 320)
    stored = np.rot90(upright, degrees // 90)  # to the left, so that turning right mends it
    path = make_video(tmp_path / "a.mp4", steady(3), width=320, height=180, frames=np.stack([stored] * 3))
    plain_key = clip_key(content_hash(path), probe(path), SPEC)
    set_display_matrix(path, QUARTER_TURN[degrees])
    assert (probe(path).height, probe(path).width) == upright.shape[:2]
    clips = [decode(path, SPEC, decoder) for decoder in get_args(Decoder)]
    for clip in clips:
        height = clip.frames.shape[1]
        assert (clip.frames.shape[1] > clip.frames.shape[2]) == (degrees != 180)
        assert clip.frames[:, : height // 4].mean((0, 1, 2)) == pytest.approx((230, 20, 20), abs=12)
        assert clip.frames[:, height // 2 :].mean((0, 1, 2)) == pytest.approx((20, 20, 230), abs=12)
        assert np.array_equal(clip.frames, clips[0].frames)
    same_bytes = "the digest of some bytes"
    turned = clip_key(same_bytes, probe(path), SPEC)
    assert turned != clip_key(same_bytes, dataclasses.replace(probe(path), turns=0), SPEC)
    assert turned != plain_key


def test_a_mirrored_video_is_mirrored_back(tmp_path: Path) -> None:
    picture = np.rot90(red_on_top(64, 64))  # red on the left
    path = make_video(tmp_path / "a.mp4", steady(2), width=64, height=64, frames=np.stack([picture] * 2))
    assert decode(path, SPEC).frames[0, 28, 3, 0] > 200
    set_display_matrix(path, MIRROR)
    clip = decode(path, SPEC)
    assert clip.frames[0, 28, -3, 0] > 200
    assert clip.frames[0, 28, 3, 0] < 50


def test_an_edit_list_shows_only_its_part(tmp_path: Path) -> None:
    path = make_video(tmp_path / "a.mp4", steady(20), options={"g": "5"})
    set_edit_list(path, start_s=0.5, duration_s=0.8)
    clip = decode(path, SPEC)
    assert clip.decoder == "pyav"
    assert clip.duration_s == pytest.approx(0.8, abs=0.05)
    assert np.abs(shown_times(clip.frames) - np.arange(0.5, 1.25, 0.1)).max() <= 0.06
    assert clip.times_s[0] == 0.0


@pytest.mark.parametrize("suffix", ["mp4", "mkv"])
def test_a_stream_that_starts_late_starts_at_0(tmp_path: Path, suffix: str) -> None:
    path = make_video(tmp_path / f"a.{suffix}", [5 + time for time in steady(5)])
    clip = decode(path, SPEC)
    assert clip.times_s == pytest.approx(steady(5), abs=2e-3)
    assert clip.duration_s == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(
    ("name", "codec", "pix_fmt", "width", "height"),
    [
        ("plain.mp4", "libx264", "yuv420p", 64, 48),
        ("full_range.mp4", "libx264", "yuvj420p", 64, 48),
        ("old.mp4", "mpeg4", "yuv420p", 64, 48),
        ("vp9.webm", "libvpx-vp9", "yuv420p", 64, 48),
        ("alpha.mov", "prores_ks", "yuva444p10le", 64, 48),
        ("alpha.webm", "libvpx-vp9", "yuva420p", 64, 48),
        ("ten_bit.mp4", "libx264", "yuv420p10le", 64, 48),
        ("odd.mp4", "libx264", "yuv444p", 61, 47),
        ("odd_chroma.mp4", "mpeg4", "yuv420p", 61, 47),
        ("thin.mp4", "libx264", "yuv444p", 332, 27),
        ("tiny.mp4", "mpeg4", "yuv420p", 21, 19),
        ("lossless.mkv", "ffv1", "bgr0", 61, 47),
        ("animated.gif", "gif", "rgb8", 64, 48),
    ],
)
def test_what_people_have_decodes_to_the_same_frames_whichever_decoder_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, codec: str, pix_fmt: str, width: int, height: int
) -> None:
    clock = Fraction(1, 10) if codec == "mpeg4" else Fraction(1, 100)
    path = make_video(tmp_path / name, steady(6), codec=codec, pix_fmt=pix_fmt, width=width, height=height, clock=clock)
    clip = decode(path, SPEC)
    assert len(clip.frames) == 6
    assert min(clip.frames.shape[1:3]) >= 28
    assert np.abs(clip.frames.mean((1, 2, 3)) - [grey_at(time) for time in steady(6)]).max() < 6
    monkeypatch.setitem(__import__("sys").modules, "decord", None)
    without = decode(path, SPEC)
    assert without.decoder == "pyav"
    assert np.array_equal(without.frames, clip.frames)


OPEN_GOP = {"preset": "medium", "g": "12", "x264-params": "open-gop=1:scenecut=0:b-adapt=0"}


@pytest.mark.parametrize(
    ("name", "codec", "options", "decoder"),
    [
        ("closed.mp4", "libx264", {"preset": "medium", "g": "12"}, "decord"),
        ("closed.mkv", "libx264", {"preset": "medium", "g": "12"}, "decord"),
        ("open.mp4", "libx264", OPEN_GOP, "pyav"),
        ("open.mkv", "libx264", OPEN_GOP, "pyav"),
        ("x265.mp4", "libx265", {"preset": "medium", "x265-params": "keyint=12:log-level=none"}, "pyav"),
        ("x265.mkv", "libx265", {"preset": "medium", "x265-params": "keyint=12:log-level=none"}, "pyav"),
        ("divx.mp4", "mpeg4", {"g": "12", "bf": "2"}, "pyav"),
        ("divx.avi", "mpeg4", {"g": "12", "bf": "2"}, "pyav"),
        ("asp.mp4", "mpeg4", {"g": "12"}, "decord"),
        ("dvd.mp4", "mpeg2video", {"g": "12", "bf": "2"}, "pyav"),
        ("a.wmv", "wmv2", {"g": "12"}, "pyav"),
        ("a.mpg", "mpeg1video", {"g": "12"}, "pyav"),
        ("b.mpg", "mpeg2video", {"g": "12", "bf": "2"}, "pyav"),
        ("a.vob", "mpeg2video", {"g": "12", "bf": "2"}, "pyav"),
        ("a.ts", "libx264", {"preset": "medium", "g": "12"}, "pyav"),
        ("open.ts", "libx264", OPEN_GOP, "pyav"),
        ("dvb.ts", "mpeg2video", {"g": "12", "bf": "2"}, "pyav"),
        ("long.ts", "libx264", {"preset": "medium", "g": "48"}, "pyav"),
        ("dvd.avi", "mpeg2video", {"g": "12", "bf": "2"}, "pyav"),
        ("a.avi", "libx264", {"preset": "medium", "g": "12", "x264-params": "scenecut=0:b-adapt=0"}, "pyav"),
        ("a.flv", "libx264", {"preset": "medium", "g": "12"}, "pyav"),
        ("raw.h264", "libx264", {"preset": "medium", "g": "12"}, "pyav"),
    ],
)
def test_the_frames_shown_are_those_wanted_however_they_are_coded(
    tmp_path: Path, name: str, codec: str, options: dict[str, str], decoder: str
) -> None:
    path = make_video(
        tmp_path / name,
        steady(120, 25),
        width=NUMBERED_SIZE[0],
        height=NUMBERED_SIZE[1],
        codec=codec,
        clock=CLOCK if codec.startswith("lib") and not name.endswith(".avi") else Fraction(1, 25),
        options=options,
        frames=numbered_frames(120),
    )
    for wanted in ([0, 60], [0, 30, 60, 90], list(range(0, 120, 10))):
        clip = decode(path, dataclasses.replace(SPEC, num_frames=len(wanted)))
        assert clip.decoder == decoder
        assert numbers_of(clip.frames) == wanted


def test_one_frame_is_a_clip(tmp_path: Path) -> None:
    """Development case D01."""
    clip = decode(make_video(tmp_path / "a.mp4", [0.0], width=224, height=224), SPEC)
    assert clip.frames.shape == (1, 224, 224, 3)
    assert clip.plan.notes == ("one frame, shown 2 times",)


def test_three_frames_where_sixteen_are_wanted(tmp_path: Path) -> None:
    """Development case D02: the count that is shown is on record."""
    clip = decode(make_video(tmp_path / "a.mp4", steady(3)), dataclasses.replace(SPEC, num_frames=16))
    assert (len(clip.frames), clip.plan.num_frames, clip.source_frames) == (3, 3, 3)
    assert np.abs(shown_times(clip.frames) - steady(3)).max() <= 0.06


def test_a_picture_is_a_video_of_one_frame(tmp_path: Path) -> None:
    import cv2

    cv2.imwrite(str(tmp_path / "a.png"), red_on_top(56, 84)[..., ::-1])
    clip = decode(tmp_path / "a.png", SPEC)
    assert clip.frames.shape == (1, 56, 84, 3)
    assert np.array_equal(clip.frames[0], red_on_top(56, 84))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["jpg", "tiff", "png", "webp"])
def test_a_picture_with_exif_is_upright(tmp_path: Path, suffix: str, orientation: int) -> None:
    """Every corner has another colour; Pillow says where it belongs."""
    from PIL import Image, ImageOps

    corners = np.array([[(230, 20, 20), (20, 230, 20)], [(20, 20, 230), (230, 230, 20)]], np.uint8)
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = orientation, "a camera"
    path = tmp_path / f"a.{suffix}"
    Image.fromarray(corners.repeat(56, axis=0).repeat(84, axis=1)).save(path, exif=exif)
    with Image.open(path) as stored:
        upright = np.asarray(ImageOps.exif_transpose(stored).convert("RGB"))
    assert upright.shape == ((112, 168, 3) if orientation < 5 else (168, 112, 3))
    clip = decode(path, SPEC)
    assert clip.frames.shape == (1, *upright.shape)
    for tall in (0.25, 0.75):
        for wide in (0.25, 0.75):
            place = round(tall * upright.shape[0]), round(wide * upright.shape[1])
            assert clip.frames[0][place] == pytest.approx(upright[place], abs=12)


def test_a_frame_that_is_too_thin_is_bad(tmp_path: Path) -> None:
    """Development case D03: 4300 x 20 is over 200 times as long as wide."""
    path = make_video(tmp_path / "a.mkv", steady(2), width=4300, height=20, codec="ffv1", pix_fmt="bgr0")
    with pytest.raises(BadMedia, match="4300x20 pixels are over 200 times"):
        decode(path, SPEC)


def test_a_long_thin_frame_is_shown(tmp_path: Path) -> None:
    """Development case D03: 15420 x 690."""
    path = make_video(tmp_path / "a.mkv", [0.0], width=15420, height=690, codec="mjpeg", pix_fmt="yuvj420p")
    assert decode(path, SPEC).frames.shape == (1, 28, 1036, 3)


def test_damaged_files_are_bad_with_a_reason(tmp_path: Path) -> None:
    """Development case D06."""
    whole = make_video(tmp_path / "whole.mp4", steady(30)).read_bytes()
    assert whole.index(b"mdat") < whole.index(b"moov")
    files: dict[str, tuple[bytes, str]] = {
        "cut.mp4": (whole[: len(whole) * 6 // 10], "cannot be read"),
        "empty.mp4": (b"", "empty"),
        "page.mp4": (b"<html><body>404 Not Found</body></html>".ljust(300), "cannot be read"),
        "text.mp4": (b"hello", "cannot be read"),
    }
    for name, (content, reason) in files.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(BadMedia, match=reason):
            decode(tmp_path / name, SPEC)
    with pytest.raises(BadMedia, match="no such file"):
        decode(tmp_path / "nowhere.mp4", SPEC)
    os.mkfifo(tmp_path / "pipe.mp4")  # to open it would wait for a writer
    for path in (tmp_path, tmp_path / "pipe.mp4"):
        with pytest.raises(BadMedia, match="is no file"):
            decode(path, SPEC)


def test_a_file_whose_end_is_missing_is_bad_and_says_how_much(tmp_path: Path) -> None:
    """The index says 40 frames; a clip that silently ended early would show another story."""
    noise = np.random.default_rng(0).integers(0, 255, (40, 48, 64, 3), dtype=np.uint8)
    path = make_video(tmp_path / "a.mp4", steady(40), codec="mpeg4", clock=Fraction(1, 10), frames=noise)
    content = path.read_bytes()
    media, index = content.index(b"mdat") - 4, content.index(b"moov") - 4
    # The index first, its chunk offsets moved by its own length, then half of the media.
    moved = bytearray(content[index:])
    shift = len(moved)
    table = moved.index(b"stco")
    count = int.from_bytes(moved[table + 8 : table + 12], "big")
    for entry in range(count):
        at = table + 12 + 4 * entry
        moved[at : at + 4] = (int.from_bytes(moved[at : at + 4], "big") + shift).to_bytes(4, "big")
    cut = content[:media] + bytes(moved) + content[media : media + (index - media) // 2]
    path.write_bytes(cut)
    with pytest.raises(BadMedia, match=r"cut short: \d+ of 40 frames"):
        decode(path, SPEC)


def noise(count: int) -> np.ndarray:
    """Frames that take many bytes, so that a share of a file is that share of its frames."""
    return np.random.default_rng(0).integers(0, 255, (count, 48, 64, 3), dtype=np.uint8)


@pytest.mark.parametrize("damage", ["cut", "zeroed"])
@pytest.mark.parametrize(
    ("name", "codec", "sound"),
    [
        ("a.mkv", "libx264", ""),
        ("a.webm", "libvpx-vp9", ""),
        ("sound.mkv", "libx264", "aac"),
        ("sound.webm", "libvpx-vp9", "libopus"),
        ("a.avi", "mpeg4", ""),
    ],
)
def test_a_file_that_ends_before_its_header_says_is_bad(
    tmp_path: Path, name: str, codec: str, sound: str, damage: str
) -> None:
    clock = Fraction(1, 10) if codec == "mpeg4" else CLOCK
    path = make_video(
        tmp_path / name, steady(40), codec=codec, clock=clock, frames=noise(40), sound=sound, sound_s=8 if sound else 0
    )
    assert decode(path, SPEC).duration_s == pytest.approx(4.0, abs=0.1)
    content = path.read_bytes()
    third = len(content) // 3
    broken = {"cut": content[: len(content) * 6 // 10], "zeroed": content[:third] + bytes(third) + content[2 * third :]}
    path.write_bytes(broken[damage])
    with pytest.raises(BadMedia, match=r"cut short: \d\.\d of (3\.9|4\.0) s are there"):
        decode(path, SPEC)


def test_a_fragmented_mp4_with_a_hole_or_a_cut_is_bad(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    fragments = {"movflags": "frag_keyframe+empty_moov"}
    make_video(path, steady(40), frames=noise(40), options={"g": "5"}, container_options=fragments)
    content = path.read_bytes()
    moofs = [at - 4 for at in range(len(content)) if content[at : at + 4] == b"moof"]
    assert len(moofs) == 8
    hole = content[: moofs[3]] + bytes(moofs[5] - moofs[3]) + content[moofs[5] :]
    cases = {
        hole: f"the fragments past byte {moofs[3]} cannot be found",
        content[: moofs[5] + 20]: "bytes are there",
        content[: moofs[5] - 20]: "24 of 25 frames are there",
    }
    for broken, reason in cases.items():
        path.write_bytes(broken)
        with pytest.raises(BadMedia, match=f"cut short: .*{reason}"):
            decode(path, SPEC)
    for whole in (content, content + bytes(1000), content + b"a trailer of a camera"):
        path.write_bytes(whole)
        assert decode(path, SPEC).source_frames == 40


@pytest.mark.parametrize("sound", ["", "aac"])
def test_a_cut_flv_is_bad(tmp_path: Path, sound: str) -> None:
    path = make_video(tmp_path / "a.flv", steady(40), frames=noise(40), sound=sound, sound_s=8)
    assert decode(path, SPEC).duration_s == pytest.approx(4.0, abs=0.1)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 6 // 10])
    with pytest.raises(BadMedia, match="cut short"):
        decode(path, SPEC)


@pytest.mark.parametrize(
    ("name", "codec", "sound", "options"),
    [
        ("a.mp4", "libx264", "aac", {}),
        ("frag.mp4", "libx264", "aac", {"movflags": "frag_keyframe+empty_moov"}),
        ("a.mkv", "libx264", "aac", {}),
        ("a.webm", "libvpx-vp9", "libopus", {}),
        ("live.webm", "libvpx-vp9", "libopus", {"live": "1"}),
        ("a.flv", "libx264", "aac", {}),
        ("a.avi", "mpeg4", "mp2", {}),
        ("a.ts", "libx264", "aac", {}),
    ],
)
def test_sound_may_be_longer_than_the_video_and_a_length_unsaid(
    tmp_path: Path, name: str, codec: str, sound: str, options: dict[str, str]
) -> None:
    clock = Fraction(1, 10) if codec == "mpeg4" else CLOCK
    path = make_video(
        tmp_path / name, steady(20), codec=codec, clock=clock, sound=sound, sound_s=8, container_options=options
    )
    assert decode(path, SPEC).duration_s == pytest.approx(2.0, abs=0.1)


@pytest.mark.parametrize("times", [[0.0], [0.0, 5.0], [0.0, 0.1, 0.2, 4.0]])
@pytest.mark.parametrize("suffix", ["mkv", "flv", "mp4"])
def test_pictures_that_stay_for_long_are_no_cut(tmp_path: Path, times: list[float], suffix: str) -> None:
    assert decode(make_video(tmp_path / f"a.{suffix}", times), SPEC).source_frames == len(times)


@pytest.mark.parametrize("share", [0.5, 0.9])
@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.webp", "a.gif"])
def test_a_picture_that_is_cut_short_is_bad(tmp_path: Path, name: str, share: float) -> None:
    """FFmpeg fills the rest of a JPEG with grey."""
    from PIL import Image

    path = tmp_path / name
    Image.fromarray(noise(1)[0]).save(path)
    assert decode(path, SPEC).source_frames == 1
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(BadMedia):
        decode(path, SPEC)


def test_an_animation_that_is_cut_short_is_bad(tmp_path: Path) -> None:
    path = make_video(
        tmp_path / "a.gif", steady(40), codec="gif", pix_fmt="rgb8", clock=Fraction(1, 100), frames=noise(40)
    )
    content = path.read_bytes()
    assert decode(path, SPEC).source_frames == 40
    path.write_bytes(content[: len(content) * 6 // 10])
    with pytest.raises(BadMedia, match="cut short"):
        decode(path, SPEC)
    path.write_bytes(content[:-1])  # the byte that says so, no picture
    assert decode(path, SPEC).source_frames == 40


def test_a_file_without_pictures_is_bad(tmp_path: Path) -> None:
    import wave

    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(bytes(1600))
    with pytest.raises(BadMedia, match="no video stream"):
        decode(tmp_path / "a.wav", SPEC)


def test_far_frames_are_reached_over_keyframes_and_equal_those_read_in_order(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 255, (90, 6, 8, 3), dtype=np.uint8).repeat(8, axis=1).repeat(8, axis=2)
    path = make_video(tmp_path / "a.mp4", steady(90), frames=frames, options={"g": "10", "bf": "2", "preset": "fast"})
    every = decode(path, dataclasses.replace(SPEC, max_frames=90), "pyav")
    few = decode(path, dataclasses.replace(SPEC, num_frames=4), "pyav")
    chosen = [frame_at(probe(path).times_s, time) for time in few.plan.times_s]
    assert chosen == [0, 22, 45, 67]
    assert np.array_equal(few.frames, every.frames[chosen])
    assert np.array_equal(few.frames, decode(path, dataclasses.replace(SPEC, num_frames=4), "decord").frames)
