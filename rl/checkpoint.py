"""Checkpoints that are complete or not there: written aside, sealed by a manifest, renamed, then older ones are pruned.

    run_dir/checkpoints/rl_000004/   progress.json   where the run is: phase, step, task cursor, totals, best evaluation
                                     rng_rank0.pt    python, numpy and torch generators, a file a rank
                                     runtime/        weights and optimizer, as the runtime wrote them
                                     manifest.json   config, and every file's size and digest; written last

Knows nothing about what the runtime's files hold.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import shutil
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from configs.errors import UserError
from configs.schema import RunConfig
from rl.interfaces import Persistent

logger = logging.getLogger(__name__)

PHASES = ("imitation", "rl")
MAY_CHANGE = frozenset(
    {
        *("run_dir", "steps", "resume", "eval_every", "save_every", "keep_checkpoints", "runtime.doctor"),
        *("data.workers", "data.prefetch", "data.decode_timeout_s", "data.cache_dir", "data.cache_bytes"),
        "data.max_bad_fraction",
    }
)
"""Config keys that a resumed run may set otherwise than the run it continues."""
DIGEST_LIMIT_BYTES = 64 << 20
"""Larger files are checked by size alone: hashing the weights of a 7B model would stop training for a minute."""
_MANIFEST = "manifest.json"
_PARTIAL = ".partial-"
_NAME = re.compile(rf"({re.escape(_PARTIAL)})?({'|'.join(PHASES)})_\d+")


@dataclass
class Progress:
    """How far a run has come; everything but weights and generators that it needs to go on."""

    phase: Literal["imitation", "rl"] = "imitation"
    step: int = 0
    """Finished steps of the phase (count)."""
    imitation_sampler: dict[str, int] = field(default_factory=dict)
    sampler: dict[str, int] = field(default_factory=dict)
    """Task cursors of the two phases."""
    before: dict[str, Any] | None = None
    """Evaluation before the first step of reinforcement learning."""
    best: dict[str, Any] | None = None
    """`step` and `success` of the best evaluation so far."""
    totals: dict[str, float] = field(default_factory=dict)
    """Sums over the run so far: `wall_s`, and of reinforcement learning `tokens/*` and the seconds in `window/*`."""

    @property
    def name(self) -> str:
        """Folder name of this point of the run."""
        return f"{self.phase}_{self.step:06d}"


def prepare_run_folder(config: RunConfig) -> Path | None:
    """Check that the run may write to `run_dir`; returns the checkpoint it continues from, if any.

    Called before any model loads, so that a run does not find out after minutes.

    Raises:
        UserError: the folder cannot be written, holds checkpoints that `resume=never` would mix with, or holds those of
            a run with another config.
    """
    folder = Path(config.run_dir)
    probe = folder / "checkpoints" / f".probe-{os.getpid()}"
    try:
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise UserError(f"run_dir {folder} cannot be written: {error.strerror}. Choose another run_dir=...") from error
    newest = latest_complete(folder)
    if newest is None:
        return None
    if config.resume == "never":
        raise UserError(
            f"run_dir {folder} already holds checkpoint {newest.name}. "
            "Continue it with resume=auto, or choose another run_dir=..."
        )
    _check_same_config(config, newest)
    return newest


def latest_complete(run_dir: Path) -> Path | None:
    """The newest checkpoint whose files are all there, byte for byte; incomplete ones are named in the log."""
    for folder in sorted(_entries(run_dir / "checkpoints"), key=_order, reverse=True):
        problem = incomplete_reason(folder)
        if problem is None:
            return folder
        logger.warning("checkpoint %s is incomplete (%s): ignored", folder.name.removeprefix(_PARTIAL), problem)
    return None


def incomplete_reason(folder: Path) -> str | None:
    """Why a checkpoint cannot be used, or None where it is complete."""
    if folder.name.startswith(_PARTIAL):
        return "its save was interrupted"
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
    except FileNotFoundError:
        return f"no {_MANIFEST}"
    except (OSError, ValueError):
        return f"{_MANIFEST} is damaged"
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, dict) or not files or not isinstance(manifest.get("config"), dict):
        return f"{_MANIFEST} lists no files, or no config"
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if _describe(path) != expected:
            return f"{name} is damaged"
    return None


def save_checkpoint(
    config: RunConfig, runtime: Persistent, progress: Progress, rng: dict[str, Any] | None = None
) -> Path:
    """Save the run at `progress`; every rank calls it. A complete checkpoint of that name is left as it is.

    Args:
        rng: generators as they were at that point, from `rng_state()`; None takes them as they are.

    Raises:
        UserError: the disk refuses.
    """
    parent = Path(config.run_dir) / "checkpoints"
    final, partial = parent / progress.name, parent / f"{_PARTIAL}{progress.name}"
    rng = rng or rng_state()
    exists = runtime.all_reduce({"exists_max": float(runtime.rank == 0 and _is_saved(final))})["exists_max"]
    if exists:
        return final
    try:
        if runtime.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        _barrier(runtime)
        runtime.save(partial / "runtime")
        torch.save(rng, partial / f"rng_rank{runtime.rank}.pt")
        _barrier(runtime)
        if runtime.rank == 0:
            _seal(config, progress, partial)
            _publish(partial, final)
            _prune(parent, final, config.keep_checkpoints)
        _barrier(runtime)
    except OSError as error:
        raise UserError(
            f"checkpoint {final} could not be written: {error.strerror or error}. "
            "Free some space, or choose another run_dir=..."
        ) from error
    return final


def load_checkpoint(folder: Path, runtime: Persistent) -> Progress:
    """Restore weights, optimizer and generators from a complete checkpoint; every rank calls it."""
    progress = Progress(**json.loads((folder / "progress.json").read_text()))
    runtime.load(folder / "runtime")
    rng = folder / f"rng_rank{runtime.rank}.pt"
    if rng.is_file():
        restore_rng(torch.load(rng, weights_only=True))
    else:
        logger.warning("checkpoint %s has no generators for rank %d: they start afresh", folder.name, runtime.rank)
    return progress


def rng_state() -> dict[str, Any]:
    """States of the global generators of python, numpy and torch."""
    kind, keys, *rest = np.random.get_state()
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Undo whatever was drawn since `rng_state()`."""
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def flat_config(config: RunConfig) -> dict[str, Any]:
    """`section.field` -> value, as on the command line and in a manifest."""
    flat: dict[str, Any] = {}
    for key, value in asdict(config).items():
        if isinstance(value, dict):
            flat |= {f"{key}.{name}": inner for name, inner in value.items()}
        else:
            flat[key] = value
    return flat


def _check_same_config(config: RunConfig, folder: Path) -> None:
    saved: dict[str, Any] = json.loads((folder / _MANIFEST).read_text())["config"]
    now: dict[str, Any] = json.loads(json.dumps(flat_config(config)))
    differing = sorted(key for key in (saved.keys() | now.keys()) - MAY_CHANGE if saved.get(key) != now.get(key))
    if differing:
        changes = ", ".join(f"{key} (was {saved.get(key)!r}, is {now.get(key)!r})" for key in differing)
        raise UserError(
            f"checkpoint {folder} belongs to a run with another config: {changes}. "
            "Set them back, or start afresh with another run_dir=..."
        )


def _entries(folder: Path) -> list[Path]:
    """Checkpoints of a folder, complete or not."""
    if not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if path.is_dir() and _NAME.fullmatch(path.name)]


def _order(path: Path) -> tuple[int, int]:
    """How far the run had come, from a checkpoint's name."""
    phase, _, step = path.name.removeprefix(_PARTIAL).rpartition("_")
    return PHASES.index(phase), int(step)


def _describe(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    digest = blake2b(path.read_bytes(), digest_size=16).hexdigest() if size <= DIGEST_LIMIT_BYTES else None
    return {"bytes": size, "blake2b": digest}


def _seal(config: RunConfig, progress: Progress, folder: Path) -> None:
    """Write what rank 0 owns, flush everything to the disk, and only then the manifest."""
    (folder / "progress.json").write_text(json.dumps(asdict(progress), indent=1))
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        _fsync(path)
    manifest = {
        "config": flat_config(config),
        "files": {path.relative_to(folder).as_posix(): _describe(path) for path in files},
    }
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1))
    _fsync(folder / _MANIFEST)
    for path in (*(path for path in folder.rglob("*") if path.is_dir()), folder):
        _fsync(path)


def _publish(partial: Path, final: Path) -> None:
    shutil.rmtree(final, ignore_errors=True)  # an incomplete one of that name: a complete one is never saved over
    partial.rename(final)
    _fsync(final.parent)


def _prune(parent: Path, newest: Path, keep: int) -> None:
    """Remove all but the `keep` newest up to the one just written; interrupted saves go too."""
    older = [path for path in _entries(parent) if path != newest and not path.name.startswith(_PARTIAL)]
    partials = [path for path in _entries(parent) if path.name.startswith(_PARTIAL)]
    for path in (*sorted(older, key=_order, reverse=True)[keep - 1 :], *partials):
        shutil.rmtree(path, ignore_errors=True)


def _is_saved(folder: Path) -> bool:
    return folder.is_dir() and incomplete_reason(folder) is None


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _barrier(runtime: Persistent) -> None:
    """All ranks have come here."""
    runtime.all_reduce({"barrier": 0.0})
