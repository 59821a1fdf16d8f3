"""One way of doing a step, measured: time by phase, memory, utilisation, and how far its gradient is from the first's.

An arm is a schedule with settings. It makes untimed steps first; in the first of them its gradient is compared. Where
its numbers come from a part of the groups, they are scaled to all and say so.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bench.flops import PEAK_FLOPS, rollout_flops, training_flops
from bench.gradient import Reference
from bench.steps import Step, Work, medians, run_step
from configs.errors import ConfigError
from runtime.kernels import Kernels
from runtime.memory import PHASES, plan
from runtime.rollplex import Rollplex
from runtime.window import JOB_KINDS, SCHEDULES
from runtime.work import GroupWork

PREFIX_REPEATS = 3


@dataclass(frozen=True)
class Arm:
    """A way of doing a step."""

    name: str
    schedule: str
    kernels: Kernels = "fused"
    reuse: bool = False
    """The actor's forward of a prompt is taken from the rollout's prefill."""
    window_sms: int | None = None
    """Multiprocessors that window work is confined to, 0 for none; None: as configured (count)."""

    @classmethod
    def parse(cls, name: str) -> Arm:
        """A schedule, and any of `+reuse` and `+smsN` after it; `plain` is `unshared` with plain kernels.

        Raises:
            ConfigError: it is none of these.
        """
        first, *settings = name.split("+")
        arm = cls(name, "unshared", "plain") if first == "plain" else cls(name, first)
        if arm.schedule not in SCHEDULES:
            raise ConfigError(f"--arms {name}: unknown schedule {first!r}. Use one of: plain, {', '.join(SCHEDULES)}.")
        for setting in settings:
            if setting == "reuse" and arm.share:
                arm = replace(arm, reuse=True)
            elif (found := re.fullmatch(r"sms(\d+)", setting)) and SCHEDULES[arm.schedule].window:
                arm = replace(arm, window_sms=int(found[1]))
            else:
                raise ConfigError(
                    f"--arms {name}: {setting!r} is no setting of {first}. Shared prefixes take reuse, and schedules "
                    "with a window take smsN, as in streamed+sms64."
                )
        return arm

    @property
    def share(self) -> bool:
        """Prefixes are computed once a group."""
        return SCHEDULES[self.schedule].share


class DeviceMemory:
    """What this process takes of the device beyond what was in use when this was made, before the runtime started.

    Two peaks, read at the ends of phases. `measured` is the driver's word: tensors, what PyTorch's allocator keeps for
    later or wastes, vLLM's KV cache, CUDA graphs, libraries; within an arm the allocator gives next to nothing back, so
    that the ends of phases see the most. `in_use` leaves out what the allocator holds and no tensor uses: the most that
    tensors took at once in a phase, and what is outside the allocator at its end. There are none without CUDA.
    """

    def __init__(self) -> None:
        self._before = _used_bytes()
        self._measured = self._in_use = 0

    def begin(self) -> None:
        """Forget the peak, and give back what the arm before left in the allocator."""
        self._measured = self._in_use = 0
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def sample(self) -> None:
        """Call this as a phase ends."""
        if torch.cuda.is_available():
            used = _used_bytes() - self._before
            outside = used - torch.cuda.memory_reserved()
            self._measured = max(self._measured, used)
            self._in_use = max(self._in_use, torch.cuda.max_memory_allocated() + outside)
            torch.cuda.reset_peak_memory_stats()

    def peaks(self) -> dict[str, float]:
        """The peaks since `begin` (GiB)."""
        if not torch.cuda.is_available():
            return {}
        return {"peak_gib_measured": self._measured / 2**30, "peak_gib_in_use": self._in_use / 2**30}


def _used_bytes() -> int:
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


class Bench:
    """Measures arms on one runtime, one after another.

    Args:
        part: groups that arms without shared prefixes train on, and that gradients are compared on (count).
    """

    def __init__(self, runtime: Rollplex, work: Work, memory: DeviceMemory, part: int) -> None:
        self.runtime = runtime
        self.work = work
        self.memory = memory
        self.part = part
        self.reference = Reference(part)

    def begin(self, arm: Arm) -> dict[str, Any]:
        """Change to an arm, and make its first untimed step; returns how its gradient compares."""
        self.runtime.use_kernels(arm.kernels)
        self.runtime.reuse_prefill = arm.reuse
        configured = self.runtime.config.runtime.window_sms
        self.runtime.use_window_sms(configured if arm.window_sms is None else arm.window_sms)
        self.runtime.use_schedule(arm.schedule)
        self.memory.begin()
        found: dict[str, Any] = {}
        self.reference.same_tokens = True

        def compare() -> None:
            found.update(self.reference.compare(self.runtime.trainer.gradients.flat))

        run_step(
            self.runtime, self.work, register=self.reference.register, inspect=compare, after_phase=self.memory.sample
        )
        return found | {"grad_tokens_equal": self.reference.same_tokens}

    def trained(self, arm: Arm) -> int:
        """Groups that the arm's timed steps train on (count)."""
        return len(self.work.prompts) if arm.share else self.part

    def step(self, arm: Arm) -> Step:
        """A step in which every clip goes through the vision tower again, as new ones would."""
        for model in filter(None, (self.runtime.actor, self.runtime.updater.reference)):
            self.runtime.vision.forget(model.tower)
        trained = self.trained(arm)
        return run_step(
            self.runtime,
            self.work,
            register=lambda group: group if group.index < trained else None,
            after_phase=self.memory.sample,
        )

    def numbers(self, arm: Arm, steps: Sequence[Step]) -> dict[str, Any]:
        """Medians of an arm's timed steps, and what follows from them."""
        groups, trained = len(self.work.prompts), self.trained(arm)
        phase_s = scaled(medians([step.phase_s for step in steps]), groups / trained)
        job_s = medians([step.job_s for step in steps])
        stats = medians([step.stats for step in steps])
        prefix_s = self._prefix_s()
        step_s, train_s = sum(phase_s.values()), sum(job_seconds(job_s, *JOB_KINDS)) / trained
        result = {
            "step_s": step_s,
            "rollout_s": phase_s["rollout"],
            "phase_s": phase_s,
            "train_s_per_group": train_s,
            "prefix_forward_s": sum(job_seconds(job_s, "actor_prefix")) / groups if arm.reuse else prefix_s,
            "job_s": job_s,
            "tokens_per_s": self._num_tokens() / step_s,
            "hidden_s": stats["window/hidden_s"],
            "overlap_efficiency": stats["window/overlap_efficiency"],
            "weights_shared_fraction": self.runtime.weights_shared_fraction,
            "peak_gib_planned": self._planned_bytes(arm) / 2**30,
            **self.memory.peaks(),
            **(self._utilisation(arm, step_s, train_s) if torch.cuda.is_available() else {}),
        }
        if arm.schedule == "serial":
            reference = self.runtime.updater.reference is not None
            whole_s = (phase_s["score"] + phase_s["train"]) / groups
            result["hideable_s"] = serial_hideable_s(steps[-1], whole_s, prefix_s * (reference + (not arm.reuse)))
        return result | ({"scaled_from_groups": trained} if trained < groups else {})

    def _prefix_s(self) -> float:
        """The actor's forward of one group's prompts, alone on the device and without the vision tower (s)."""
        runtime, prompt = self.runtime, self.work.prompts[0]
        work = GroupWork(runtime.config.rl.group_size, runtime.packing)
        work.prompts = [[prompt] for _ in work.prompts]
        units = work.compose()[0]
        seconds: list[float] = []
        runtime.lane.seconds()
        for _ in range(PREFIX_REPEATS):
            with runtime.lane.work("alone/actor_prefix"):
                for _ in runtime.updater.encode_early([units[0].prompts]):
                    pass
            seconds += runtime.lane.seconds().values()
            runtime.updater.release()
        runtime.updater.take_sums()  # it belongs to no step
        return statistics.median(seconds) * len(units)

    def _num_tokens(self) -> int:
        """Prompt and response tokens of all rollouts, the same in every arm (count)."""
        return sum(
            len(prompt.token_ids) * len(lengths) + sum(lengths)
            for prompt, lengths in zip(self.work.prompts, self.work.lengths, strict=True)
        )

    def _planned_bytes(self, arm: Arm) -> int:
        config = self.runtime.config
        settings = replace(config.runtime, schedule=arm.schedule, reuse_prefill=arm.reuse)  # type: ignore[arg-type]
        table = plan(replace(config, runtime=settings), self.runtime.shape)
        return max(table.peak(phase) for phase in PHASES)

    def _utilisation(self, arm: Arm, step_s: float, train_s_per_group: float) -> dict[str, float]:
        """Operations over time and `PEAK_FLOPS`: of the whole step, and of reference and training while they run."""
        shape, reference = self.runtime.shape, self.runtime.updater.reference is not None
        rollout, training = 0.0, 0.0
        for prompt, lengths in zip(self.work.prompts, self.work.lengths, strict=True):
            tokens = len(prompt.token_ids)
            rollout += rollout_flops(shape, tokens, lengths)
            training += training_flops(
                shape, tokens, lengths, share=arm.share, reuse=arm.reuse, reference=reference
            )  # fmt: skip
        train_s = train_s_per_group * len(self.work.prompts)
        return {"mfu": (rollout + training) / step_s / PEAK_FLOPS, "train_mfu": training / train_s / PEAK_FLOPS}


def scaled(phase_s: Mapping[str, float], factor: float) -> dict[str, float]:
    """Phases of a step that trains on so many times the groups; the other phases had all of them."""
    return {phase: seconds * (factor if phase in ("score", "train") else 1) for phase, seconds in phase_s.items()}


def serial_hideable_s(step: Step, group_s: float, prefix_s: float) -> float:
    """Of a serial step's work, what a perfect window would hide (s). Each group is taken to need as long.

    Args:
        group_s: reference and training of a group (s).
        prefix_s: of it, what depends on the prompt alone (s).
    """
    later = [(ended_s, group_s - prefix_s) for ended_s in step.group_ended_s.values()]
    return hideable_s(prefix_s * len(later), later, step.phase_s["rollout"])


def hideable_s(known_at_once: float, later: Sequence[tuple[float, float]], end_s: float) -> float:
    """Work that could be done by `end_s`, one piece at a time and each at full speed once it is known (s).

    Args:
        known_at_once: work that may begin at 0 (s).
        later: when more of it may begin, and how much it is (s, s).
    """
    done, waiting, now = 0.0, known_at_once, 0.0
    for begins, amount in [*sorted(later), (end_s, 0.0)]:
        ran = min(waiting, begins - now)
        done, waiting, now = done + ran, waiting - ran + amount, begins
    return done


def job_seconds(job_s: Mapping[str, float], *kinds: str) -> list[float]:
    """Times of jobs of these kinds, wherever they ran (s)."""
    return [seconds for name, seconds in job_s.items() if name.partition("/")[2] in kinds]
