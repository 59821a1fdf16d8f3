"""`run.py bench device`: the runtime on a device, ways of doing a step side by side in one process on identical work.

What is on disk is complete after every arm, since a device may be taken away. Knows what is run and what is made of the
numbers; how they are measured is `bench.measure`'s business.
"""

from __future__ import annotations

import datetime
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.measure import Arm, Bench, DeviceMemory
from bench.picture import draw_phases, draw_trace
from bench.schedules import aligned
from bench.steps import LONG_TAIL, Work, opened, response_lengths
from configs.errors import ConfigError
from configs.schema import RunConfig
from runtime.tracing import TIMELINE
from runtime.window import SCHEDULES

RATIOS = (
    ("unshared/serial train", "train_s_per_group", "unshared", "serial"),
    ("unshared/streamed step", "step_s", "unshared", "streamed"),
    ("serial/streamed step", "step_s", "serial", "streamed"),
    ("plain/streamed step", "step_s", "plain", "streamed"),
    ("plain/streamed+reuse step", "step_s", "plain", "streamed+reuse"),
)
"""Name, number, numerator and denominator of each ratio of arms."""
COLUMNS = (
    "step_s", "rollout_s", "train_s_per_group", "prefix_forward_s", "tokens_per_s", "mfu", "hidden_s",
    "peak_gib_planned", "peak_gib_measured", "peak_gib_in_use", "grad_cosine", "grad_rel_err",
)  # fmt: skip
"""What is printed of an arm, where it has it."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is run, besides the config."""

    arms: Sequence[Arm]
    """The first is the one that gradients are compared with."""
    clip: Sequence[int]
    """Frames, height and width."""
    folder: Path
    """Where the result is written."""
    repeats: int = 1
    warmup: int = 1
    """Untimed steps of an arm; the first of them compares the gradient (count)."""
    unshared_groups: int | None = None
    """Groups that arms without shared prefixes train on; None: all (count)."""
    long_tail: bool = False
    trace: Path | None = None
    """Where the timeline of a timed step of `overlapped` is written, and a picture of it beside."""
    command: str = ""

    def __post_init__(self) -> None:
        if min(self.repeats, self.warmup) < 1:
            raise ConfigError("--repeats and --warmup must be at least 1: the gradient is compared in an untimed step.")
        if self.trace and "overlapped" not in {arm.name for arm in self.arms}:
            raise ConfigError("--trace draws a step of the arm overlapped: add it to --arms.")


def shaped(
    config: RunConfig, *, groups: int | None, group_size: int | None, response: int | None, long_tail: bool
) -> RunConfig:
    """The config with the shape that the command line asks for."""
    groups, size = groups or config.rl.groups_per_step, group_size or config.rl.group_size
    longest = LONG_TAIL[1] if long_tail else response or config.rollout.max_tokens
    return replace(
        config,
        rl=replace(config.rl, groups_per_step=groups, group_size=size),
        rollout=replace(config.rollout, max_tokens=longest),
    )


def compare(config: RunConfig, options: Options, report: Callable[[str], None]) -> dict[str, Any]:
    """Measure all arms; `report` gets a line as each ends. Returns what is on disk.

    Returns:
        `device`, `command`, `shape`; `arms.<arm>` as `Bench.numbers` has it; and what `summary` adds.
    """
    memory = DeviceMemory()
    with opened(config, options.clip) as (runtime, prompts):
        work = Work(prompts, response_lengths(config, long_tail=options.long_tail))
        bench = Bench(runtime, work, memory, min(options.unshared_groups or len(prompts), len(prompts)))
        result: dict[str, Any] = {
            "date": datetime.date.today().isoformat(),
            "command": options.command,
            "shape": _shape(config, work, options),
            "arms": {},
        }
        for arm in options.arms:
            result["arms"][arm.name] = _measure(bench, arm, options)
            result |= {"device": _device(), **summary(result["arms"])}
            path = _write(result, options.folder)
            report(_line(arm.name, result["arms"][arm.name]))
        report(f"written to {path}")
    return result


def _measure(bench: Bench, arm: Arm, options: Options) -> dict[str, Any]:
    gradient = bench.begin(arm)
    for _ in range(options.warmup - 1):
        bench.step(arm)
    steps = [bench.step(arm) for _ in range(options.repeats - 1)]
    with _traced(options.trace if arm.name == "overlapped" else None):
        steps.append(bench.step(arm))
    return bench.numbers(arm, steps) | gradient


@contextmanager
def _traced(path: Path | None) -> Iterator[None]:
    """Write a timeline of the block and draw it; without a path, only run it."""
    TIMELINE.recording = path is not None
    try:
        yield
    finally:
        TIMELINE.recording = False
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        TIMELINE.write(path)
        draw_trace(json.loads(path.read_text()), path.with_suffix(".png"))


def summary(arms: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Numbers across arms, as far as the arms have been measured.

    Returns:
        `grad_reference`, `grad_cosine_min`; `ratios`; `windows.<arm>` with the `gain` over the serial arm, the `bound`
        that perfect hiding would give and the `share` of the hideable time that was hidden; `streamed`'s gain and bound
        as `window_gain` and `window_gain_bound`.
    """
    windows = {name: window_gain(arms[serial], arm) for name, arm in arms.items() if (serial := _serial(name)) in arms}
    result: dict[str, Any] = {
        "grad_reference": next(iter(arms)),
        "grad_cosine_min": min(arm["grad_cosine"] for arm in arms.values()),
        "ratios": {
            name: arms[above][number] / arms[below][number]
            for name, number, above, below in RATIOS
            if above in arms and below in arms
        },
        "windows": windows,
    }
    if streamed := windows.get("streamed"):
        result |= {"window_gain": streamed["gain"], "window_gain_bound": streamed["bound"]}
    return result


def _serial(name: str) -> str:
    """The serial arm that an arm with a window is compared with; empty for other arms."""
    schedule, *settings = name.split("+")
    if schedule == "plain" or not SCHEDULES[schedule].window:
        return ""
    return "+".join(["serial", *(setting for setting in settings if setting == "reuse")])


def window_gain(serial: Mapping[str, Any], arm: Mapping[str, Any]) -> dict[str, float]:
    """Serial over this arm's step; the same if all hideable work were hidden for nothing; the share that was."""
    bound = serial["step_s"] / (serial["step_s"] - serial["hideable_s"])
    share = (serial["step_s"] - arm["step_s"]) / serial["hideable_s"]
    return {"gain": serial["step_s"] / arm["step_s"], "bound": bound, "share": share}


# --- output ----------------------------------------------------------------------------------------------------------


def table(result: Mapping[str, Any]) -> str:
    """The result as text: a row a number, a column an arm; then what was found across arms."""
    arms = result["arms"]
    names = [name for name in COLUMNS if any(name in arm for arm in arms.values())]
    rows = [[name, *(f"{arm[name]:.4g}" if name in arm else "-" for arm in arms.values())] for name in names]
    lines = aligned([["", *arms], *rows])
    lines += [f"{name}: {ratio:.2f}x" for name, ratio in result["ratios"].items()]
    lines += [
        f"{name} over serial: {window['gain']:.3f}x of {window['bound']:.3f}x, {window['share']:.0%} of perfect hiding"
        for name, window in result["windows"].items()
    ]
    return "\n".join([result["device"], ", ".join(f"{k} {v}" for k, v in result["shape"].items()), *lines])


def _line(name: str, arm: Mapping[str, Any]) -> str:
    phases = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in arm["phase_s"].items())
    scaled = f", scaled from {arm['scaled_from_groups']} groups" if "scaled_from_groups" in arm else ""
    return (
        f"{name}: step {arm['step_s']:.2f} s ({phases}){scaled}; reference and training {arm['train_s_per_group']:.3f} "
        f"s a group; gradient cosine {arm['grad_cosine']:.6f}"
    )


def _shape(config: RunConfig, work: Work, options: Options) -> dict[str, Any]:
    lengths = [length for group in work.lengths for length in group]
    return {
        "model": config.model.path.rpartition(":")[2].rstrip("/").rpartition("/")[2],
        "groups": config.rl.groups_per_step,
        "group_size": config.rl.group_size,
        "prompt_tokens": len(work.prompts[0].token_ids),
        "response_tokens": sum(lengths) / len(lengths),
        "longest_response": max(lengths),
        "long_tail": options.long_tail,
        "kl_coef": config.rl.kl_coef,
    }


def _device() -> str:
    """The device, and what ran on it."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return ", ".join(
        [name, *(f"{module} {sys.modules[module].__version__}" for module in ("torch", "vllm", "deepspeed"))]
    )


def _write(result: Mapping[str, Any], folder: Path) -> Path:
    """Write `<date>-<device>-<shape>.json`, and the figure beside it."""
    shape = result["shape"]
    device = result["device"].partition(",")[0].lower().removeprefix("nvidia ")
    responses = "longtail" if shape["long_tail"] else f"r{shape['longest_response']}"
    words = [
        result["date"], device, shape["model"], f"{shape['groups']}x{shape['group_size']}",
        f"p{shape['prompt_tokens']}", responses,
    ]  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{re.sub(r'[^a-z0-9_-]+', '-', '-'.join(words))}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    draw_phases(result, path.with_suffix(".png"))
    return path
