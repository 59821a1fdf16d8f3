"""What one decode process does: look a clip up in the cache, else decode it, and leave it in a file.

Knows nothing about rows, order or time limits: `data.decode_pool` asks and watches.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from configs.errors import UserError
from data.budget import ClipPlan, ClipSpec
from data.child_process import Handler
from data.decode import DecodedClip, Decoder, clip_key, decode
from data.frame_cache import FrameCache, read_frames, write_frames
from data.video_index import BadMedia, content_hash, probe


@dataclass(frozen=True)
class DecodeSetup:
    """What a worker is told once."""

    spec: ClipSpec
    cache_dir: Path | None
    """None keeps nothing."""


@dataclass(frozen=True)
class DecodeTask:
    """One clip to decode."""

    ticket: int
    path: Path
    target: Path
    """File that the frames are left in."""
    decoder: Decoder = "auto"
    max_tokens: int = 0
    """Placeholder tokens this clip may have at most; 0 leaves it to the setup's spec."""


@dataclass(frozen=True)
class DecodeAnswer:
    """How a task ended."""

    ticket: int
    outcome: Literal["decoded", "cached", "bad", "user_error"]
    detail: str
    """Cache key of frames, reason of a failure."""
    finished_at: float
    """`time.monotonic` (s), which all processes of a machine share."""


def make_handler(setup: DecodeSetup) -> Handler:
    """The handler of `DecodeTask`s; None only asks whether the worker is there."""
    import av  # noqa: F401  # loaded before a clip's time runs
    import cv2
    import decord  # noqa: F401

    cv2.setNumThreads(1)
    cache = FrameCache(setup.cache_dir, limit_bytes=0) if setup.cache_dir else None

    def handle(task: DecodeTask | None) -> DecodeAnswer | None:
        if task is None:
            return None
        try:
            outcome, detail = _run(task, setup.spec, cache)
        except BadMedia as error:
            outcome, detail = "bad", str(error)
        except UserError as error:
            outcome, detail = "user_error", str(error)
        except Exception as error:  # whatever a damaged file makes a library raise, the reason is the file
            outcome, detail = "bad", f"decoding failed ({type(error).__name__}: {error})"
        return DecodeAnswer(task.ticket, outcome, detail, time.monotonic())

    return handle


def _run(
    task: DecodeTask, spec: ClipSpec, cache: FrameCache | None
) -> tuple[Literal["decoded", "cached", "bad", "user_error"], str]:
    if task.max_tokens and (not spec.max_tokens or task.max_tokens < spec.max_tokens):
        spec = dataclasses.replace(spec, max_tokens=task.max_tokens)
    index, key = probe(task.path), ""
    if cache is not None:
        key = clip_key(content_hash(task.path), index, spec)
        if cache.take(key, task.target):
            return "cached", key
    clip = decode(task.path, spec, task.decoder, index)
    try:
        write_frames(task.target, clip.frames, clip_facts(clip))
    except OSError as error:
        raise UserError(
            f"{task.target}: cannot write decoded frames ({error}). Make room, or set data.cache_dir."
        ) from error
    return "decoded", key


def clip_facts(clip: DecodedClip) -> dict[str, Any]:
    """Everything about a clip but its frames, as plain JSON values."""
    fields = {field.name: getattr(clip, field.name) for field in dataclasses.fields(clip) if field.name != "frames"}
    return fields | {"plan": dataclasses.asdict(clip.plan)}


def load_clip(path: Path) -> DecodedClip:
    """Read back what a worker left.

    Raises:
        OSError: the file is gone.
        ValueError: it is damaged.
    """
    frames, facts = read_frames(path)
    return DecodedClip(frames=frames, **{**facts, "plan": _plan(facts["plan"]), "times_s": tuple(facts["times_s"])})


def _plan(facts: Mapping[str, Any]) -> ClipPlan:
    return ClipPlan(**{**facts, "grid_thw": tuple(facts["grid_thw"]), "notes": tuple(facts["notes"])})
