"""Rollplex: rollout, reference scoring and training on the same device, without changing the algorithm.

The only door into `runtime/`. While responses decode, it already computes whatever depends only on tokens that exist;
`update` does the rest and steps the optimizer on the memory that the rollout engine reads.
"""

from __future__ import annotations

import copy
import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import torch

from configs.errors import UserError
from configs.schema import RunConfig
from data.types import Group, GroupLoss, Prompt, Response, Sampling, TurnKey, Vocabulary
from runtime import tracing
from runtime.deepspeed_engine import Trainer, init_distributed
from runtime.kernels import Kernels
from runtime.lane import InlineLane, StreamLane, make_lane
from runtime.memory import PHASES, Ledger, ModelShape, max_videos, model_shape, plan
from runtime.overlap import DecodeStep, OverlapMeter, admitted, prefills
from runtime.parking import HostCopy
from runtime.prefix_tree import Row, StaleEncoding
from runtime.tracing import TIMELINE
from runtime.update import Steps, Updater
from runtime.vision import VisionCache
from runtime.vllm_engine import RolloutEngine
from runtime.vlm import SplitVLM, load_vlm
from runtime.window import JOB_KINDS, SCHEDULES, Fallback, Job, JobKind, Window
from runtime.work import GroupWork, Packing

logger = logging.getLogger(__name__)
T = TypeVar("T")

WAKE_MARGIN = 2 << 30
"""Free device memory, beside the KV cache's, below which PyTorch's idle memory is given back before it (bytes)."""


@dataclass(eq=False)
class _Registered:
    """A finished group, waiting for its gradient."""

    group: Group
    loss: GroupLoss
    work: GroupWork
    since_s: float
    """When it was registered (`time.perf_counter`)."""
    streamed: bool = False
    """Given to the window."""
    trained: bool = False
    """Begun, in the window or after it."""


class Rollplex:
    """Owns vLLM, DeepSpeed and every large buffer of this process.

    The rollout engine starts with `start` or the first `submit`; who only trains on recorded groups never needs it.

    Args:
        model_dir: Hugging Face folder of the actor (and, with `rl.kl_coef > 0`, of the reference).
        vocabulary: what may be sampled, on both sides.

    Raises:
        HBMExhausted: the plan does not fit `runtime.hbm_bytes` or the device.
    """

    def __init__(self, config: RunConfig, model_dir: Path, vocabulary: Vocabulary) -> None:
        self.config = config
        self.model_dir = model_dir
        self.vocabulary = vocabulary
        self._gathered = ExitStack()
        init_distributed()
        train_tower = config.train.vision_tower == "trained"
        self.shape: ModelShape = model_shape(model_dir, config.model.dtype, train_tower=train_tower)
        self.plan = plan(config, self.shape, torch.distributed.get_world_size())
        if capacity := config.runtime.hbm_bytes or _device_bytes():
            self.plan.check(capacity)
        model = load_vlm(model_dir, getattr(torch, config.model.dtype), train_tower=train_tower, device=_device())
        self.trainer = Trainer(model, config.train, config.runtime)
        self._gathered.enter_context(self.trainer.gathered())
        self.ledger = Ledger()
        self.vision = VisionCache(config.runtime.vision_cache_bytes, self.ledger)
        self.actor = SplitVLM(model, vocabulary, config.rollout.temperature, self.vision)
        self.updater = Updater(
            self.actor, self.trainer.gradients, self.shape, self.ledger, config.runtime.boundary_budget_bytes
        )
        self.policy_version = 0
        self.lane: InlineLane | StreamLane = make_lane(config.runtime.window_sms)
        self._meter = OverlapMeter()
        self.use_schedule(config.runtime.schedule)
        self._fallback = Fallback(config.runtime.fallback and bool(self.window.schedule.window))
        self._groups: dict[int, GroupWork] = {}
        self.reuse_prefill = config.runtime.reuse_prefill
        """Whether prompts are wanted from the rollout engine's prefill; change it only between steps."""
        self._prefilling: list[Row] = []
        """Prompts that the rollout engine has yet to prefill for the actor."""
        self._open: set[TurnKey] = set()
        """Responses being decoded whose turns will be trained on."""
        self._registered: list[_Registered] = []
        self._train_order: list[int] = []
        self.train_order: tuple[int, ...] = ()
        """Indices of the last update's groups, rank by rank in the order in which each added their gradients."""
        self._batch_ended = False
        self._engine: RolloutEngine | None = None
        self._kv_lease = 0
        self._reference_copy: HostCopy | None = None
        self._stats: dict[str, float] = {}
        self.job_seconds: dict[str, float] = {}
        """Job time of the last update by `place/kind`, as in `WindowStats.seconds` (s)."""
        self._account_fixed_buffers()
        if config.rl.kl_coef > 0:
            self.start_rl()

    # --- life --------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Rollplex:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the rollout engine and free what the process holds."""
        self._gathered.close()
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    @property
    def rank(self) -> int:
        return self.trainer.rank

    @property
    def world_size(self) -> int:
        return self.trainer.world_size

    def start(self) -> None:
        """Start the rollout engine now. All ranks do it together, and it seeds torch's generators."""
        _ = self.engine

    @property
    def engine(self) -> RolloutEngine:
        """The rollout engine, started on first use on the trainer's weights."""
        if self._engine is None:
            with tracing.span("start_engine"):
                parameters = dict(self.trainer.engine.module.named_parameters())
                self._engine = RolloutEngine(
                    self.config.runtime, self.model_dir, self.config.model.dtype, self.vocabulary, parameters,
                    seed=self.config.seed * self.world_size + self.rank, max_videos=max_videos(self.config),
                    prefills=self.updater.prefills, share=self.trainer.stage != 3,
                )  # fmt: skip
                self._engine.publish(self.policy_version)
            self._kv_lease = self.ledger.lease("kv_cache", self.config.runtime.kv_cache_bytes)
        return self._engine

    def _wake(self) -> None:
        """Have the KV cache in HBM."""
        if self.engine.asleep:
            with tracing.span("wake"):
                if torch.cuda.mem_get_info()[0] < self.config.runtime.kv_cache_bytes + WAKE_MARGIN:
                    torch.cuda.empty_cache()
                self.engine.wake()
            self._kv_lease = self.ledger.lease("kv_cache", self.config.runtime.kv_cache_bytes)

    def _sleep(self) -> None:
        """Drop the KV cache until the next rollout, if nothing decodes."""
        if self._engine is None or self._engine.has_unfinished() or self._engine.asleep:
            return
        with tracing.span("sleep"):
            if self._engine.sleep():
                self.ledger.release(self._kv_lease)

    @property
    def weights_shared_fraction(self) -> float:
        """Bytes of vLLM's parameters that are views of the trainer's storage, over all its parameter bytes."""
        return self.engine.binding.shared_fraction()

    def _account_fixed_buffers(self) -> None:
        """Lease the buffers that live as long as the run, by what they measure."""
        model, optimizer = self.trainer.engine.module, self.trainer.engine.optimizer
        self.ledger.lease("weights", sum(_bytes(parameter) for parameter in model.parameters()))
        self.ledger.lease("gradients", _bytes(self.trainer.gradients.flat))
        master = getattr(optimizer, "single_partition_of_fp32_groups", None) or []
        masters = sum(_bytes(tensor) for tensor in master)
        moments = 2 * masters if master else 2 * 4 * self.shape.trainable // self.world_size
        self._optimizer_bytes = masters + moments
        if not self.trainer.offloads:
            self.ledger.lease("optimizer", self._optimizer_bytes)

    def use_schedule(self, name: str) -> None:
        """Follow another schedule from the next step on; only between steps."""
        schedule, config = SCHEDULES[name], self.config
        chain = config.agent.context == "history"
        self.packing = Packing(schedule.share, config.runtime.microbatch_tokens, chain)
        self.window = Window(schedule, config.runtime.backlog, self.lane, self._meter)

    def use_window_sms(self, sms: int) -> None:
        """Give window work so many multiprocessors of its own (0: none) from the next step on; only between steps."""
        if sms == self.lane.sms:
            return
        self.lane.join()
        self.lane = self.window.lane = make_lane(sms)

    def use_kernels(self, kernels: Kernels) -> None:
        """Train and score with other kernels from the next step on; only between steps."""
        for model in filter(None, (self.actor, self.updater.reference)):
            model.use_kernels(kernels)

    # --- rollout -----------------------------------------------------------------------------------------------------

    def submit(self, key: TurnKey, prompt: Prompt, sampling: Sampling, *, train: bool = True) -> None:
        """Queue a response. With `train`, work on its prompt may begin as soon as its whole row is known.

        Raises:
            PromptTooLong: prompt and response do not fit `runtime.max_model_len`.
        """
        if train:
            if self._batch_ended:
                self._groups.clear()
                self._batch_ended = False
            work = self._groups.setdefault(key.group, GroupWork(self.config.rl.group_size, self.packing))
            assert len(work.prompts[key.rollout]) == key.turn, f"{key} was submitted out of order"
            if self.reuse_prefill and (key.turn == 0 or not self.packing.chain):
                self.updater.prefills.want(key, prompt)
        self._wake()
        self.engine.submit(key, prompt, sampling, self.features(prompt))
        if train:
            self._open.add(key)
            work.prompts[key.rollout].append(prompt)
            self._compose(work)

    def features(self, prompt: Prompt) -> list[torch.Tensor]:
        """Features of the prompt's media for the rollout engine, the same ones that the actor uses."""
        with self.lane.work("rollout/vision"):
            features = [self.vision.features(self.actor.tower, item) for item in prompt.media]
        self.lane.join()  # decode reads them on its own stream; a job may have been the one that computed them
        return features

    def poll(self) -> list[tuple[TurnKey, Response]]:
        """One decode step, and work in the window while the device decodes; returns the responses that ended.

        Where the step leaves no time for it, as on a CPU, the work is done after it. With nothing to decode it is done
        alone, while simulators step.
        """
        if self._engine is None or not self._engine.has_unfinished():
            self.window.pump()
            return []
        engine, load = self._engine, self._engine.load()

        def while_decoding() -> None:
            # The scheduler has admitted by now what this step prefills.
            self.window.accompany(self.lane.decoded(), prefill=admitted(load, engine.load()))

        clean, start = not self.lane.outstanding(), time.perf_counter()
        with tracing.span("decode"), self.lane.decode():
            ended = engine.step(while_decoding)
        seconds = time.perf_counter() - start
        prefilled, prefills_next = prefills(load, engine.load(), len(ended))
        self._offer_prefilled(key for key, _ in ended)
        self.window.pump(
            DecodeStep(seconds, load.running, prefilled, clean), hold=self.lane.concurrent and prefills_next
        )
        for key, response in ended:
            if key in self._open:
                self._open.remove(key)
                self._record(self._groups[key.group], key, response)
        return ended

    def _record(self, work: GroupWork, key: TurnKey, response: Response) -> None:
        if response.policy_version != self.policy_version:
            raise StaleEncoding(f"{key} was sampled by version {response.policy_version}, now is {self.policy_version}")
        work.responses[key.rollout].append(response)
        self._compose(work)

    def has_unfinished(self) -> bool:
        """Whether responses are still being decoded."""
        return self._engine is not None and self._engine.has_unfinished()

    def end_rollout(self, group: int, rollout: int) -> None:
        """No further turn will be submitted for this rollout."""
        if not self._batch_ended and (work := self._groups.get(group)):
            work.ended[rollout] = True
            self._compose(work)

    def _offer_prefilled(self, ended: Iterable[TurnKey]) -> None:
        """Offer the window the prompts that the rollout engine has prefilled, or, in responses that ended, has not."""
        for key in ended:
            self.updater.prefills.give_up(key)
        waiting, self._prefilling = self._prefilling, []
        for row in waiting:
            self._offer_prefix(row)

    def _offer_prefix(self, row: Row) -> None:
        """Offer the window the actor's part of prompts, once it is known who computes it."""
        if self.updater.prefills.awaits(row):
            self._prefilling.append(row)
        else:
            self._offer("actor_prefix", self.updater.encode_early([row]))

    def _compose(self, work: GroupWork) -> None:
        """Offer the window what has become possible."""
        prompted, answered = work.compose()
        updater, referenced = self.updater, self.updater.reference is not None
        for unit in prompted:
            self._offer_prefix(unit.prompts)
            if referenced:
                self._offer("reference_prefix", updater.encode_reference_early([unit.prompts]))
        for unit in answered:
            if work.packing.chain:
                self._offer("actor_response", updater.encode_early(unit.rows[1:]))
            if referenced:
                self._offer("reference_score", updater.score_reference(work, unit))

    def _offer(self, kind: JobKind, steps: Steps) -> None:
        """Give work to the window, if the schedule has it there."""
        if self.window.admits(kind):
            self.window.add(Job(kind, steps))

    # --- update ------------------------------------------------------------------------------------------------------

    def train_on(self, group: Group, loss: GroupLoss) -> None:
        """Register a finished group; its gradient is added in the window (streamed) or by `update`."""
        work = self._groups.get(group.index)
        if work is None or not work.records(group):
            work = self._groups[group.index] = GroupWork.of(group, self.packing)
        self._registered.append(_Registered(group, loss, work, time.perf_counter()))
        if self.window.admits("train"):
            self._stream()

    def _stream(self) -> None:
        """Give the window the groups that it may train on: as they come, or in index order where that is decided."""
        deterministic = self.config.rollout.deterministic
        waiting = {item.group.index: item for item in self._registered if not item.streamed}
        for index in sorted(self._groups) if deterministic else list(waiting):
            if item := waiting.get(index):
                item.streamed = True
                self._note_wait(item)
                self.window.add(Job("train", self._train(item)))
            elif deterministic and not any(other.group.index == index for other in self._registered):
                break

    def _note_wait(self, item: _Registered) -> None:
        """Count how long a finished group was kept from the window by the order that is wanted."""
        self.updater.sums["window/blocked_s"] += time.perf_counter() - item.since_s

    def _train(self, item: _Registered) -> Steps:
        item.trained = True
        self._train_order.append(item.group.index)
        yield from self.updater.train(item.work, item.loss)

    def finish_gradients(self, order: Sequence[int] = ()) -> None:
        """Do what the window has not done of this step's work: all gradients are summed on this rank then.

        Args:
            order: group indices in the order in which another run added them (`train_order`), to repeat its bits; the
                groups that the window has not begun are added in index order otherwise.
        """
        with tracing.span("score"):
            self._sleep()
            self.ledger.enter("score")
            self.window.finish()
            for item in self._registered:
                for unit in item.work.units if item.loss.needs_reference and not item.trained else ():
                    if not unit.scored:
                        self.window.run(Job("reference_score", self.updater.score_reference(item.work, unit)))
        with tracing.span("train"):
            self.ledger.enter("train")
            place = {index: i for i, index in enumerate(order)}
            for item in sorted(
                self._registered, key=lambda item: (place.get(item.group.index, len(place)), item.group.index)
            ):
                if not item.trained:
                    if self.window.admits("train"):  # it waited for a group that never came
                        self._note_wait(item)
                    self.window.run(Job("train", self._train(item)))
        self.updater.release()  # what was encoded for rollouts that did not become part of a group
        self._prefilling.clear()
        self._registered.clear()
        self._batch_ended = True
        self.ledger.check_integrity(empty=("boundaries", "activations", "logits"))
        self.lane.join()

    def update(self, lr: float, order: Sequence[int] = ()) -> None:
        """Finish the step's gradients, step the optimizer and publish the new version.

        Gradients are summed over rows, groups and ranks and divided once by the sum of the groups' denominators.

        Args:
            order: as in `finish_gradients`.

        Raises:
            ValueError: no rank registered a group.
            NonFiniteGradient: the weights were not changed; the step's gradients are gone.
            StaleCache: responses are still being decoded; nothing was changed.
            StorageMoved: the rollout engine no longer reads the trainer's memory.
        """
        if self._engine is not None:
            self._engine.check_idle()
        self.finish_gradients(order)
        order_here, self._train_order = self._train_order, []
        self.train_order = tuple(index for part in self._gather(order_here) for index in part)
        self.ledger.enter("update")
        sums = self.all_reduce(self.updater.take_sums())
        denominator = sums.get("denominator", 0.0)
        if not denominator:
            raise ValueError("update() without a group: call train_on first")
        with tracing.span("optimizer"), self._scattered(), self._optimizer_room():
            grad_norm = self.trainer.step(lr, denominator)
        with tracing.span("publish"):
            self._publish()
        self._stats = self._step_stats(sums, denominator) | {"train/grad_norm": grad_norm, "train/lr": lr}
        self.ledger.enter("rollout")

    @contextmanager
    def _scattered(self) -> Iterator[None]:
        """Inside, parameters are as the optimizer keeps them (ZeRO-3: shards)."""
        self._gathered.close()
        try:
            yield
        finally:
            self._gathered.enter_context(self.trainer.gathered())

    @contextmanager
    def _optimizer_room(self) -> Iterator[None]:
        """Inside, HBM has room for the optimizer's states where they are offloaded otherwise."""
        with ExitStack() as stack:
            if self.trainer.offloads:
                stack.enter_context(self.ledger.hold("optimizer", self._optimizer_bytes))
                if self._reference_copy is not None:
                    stack.enter_context(self._reference_copy.parked())
                torch.cuda.empty_cache()
            yield

    def _publish(self) -> None:
        """Make the present weights a new version: encodings and caches of the old one are refused or dropped."""
        self.lane.join()
        self.policy_version += 1
        self.actor.version = self.policy_version
        self.updater.prefills.drop()
        if self.actor.trains_tower:
            self.vision.forget(self.actor.tower)
        if self._engine is not None:
            self._engine.publish(self.policy_version)

    def start_rl(self) -> None:
        """Freeze the reference: the actor's weights as they are now."""
        model = self.trainer.engine.module
        if self.updater.reference is None:
            tower = self.actor.tower
            shared = {} if self.actor.trains_tower else {id(tower): tower}  # a frozen one is the reference's too
            frozen = copy.deepcopy(model, memo=shared)
        else:
            frozen = self.updater.reference.model
        frozen.load_state_dict(model.state_dict())
        frozen.requires_grad_(False)
        self.vision.forget(frozen.model.visual)
        actors = set(model.parameters())
        own = [parameter for parameter in frozen.parameters() if parameter not in actors]
        if self.updater.reference is None:
            self.ledger.lease("reference", sum(map(_bytes, own)))
        self.updater.reference = SplitVLM(frozen, self.vocabulary, self.config.rollout.temperature, self.vision)
        if self._reference_copy is not None:
            self._reference_copy.refresh()
        elif self.trainer.offloads:
            self._reference_copy = HostCopy(own)

    # --- numbers -----------------------------------------------------------------------------------------------------

    def all_reduce(self, values: dict[str, float]) -> dict[str, float]:
        """Combine values over ranks: sums, and maxima of keys that end in `_max`. Ranks may lack keys."""
        if self.world_size == 1:
            return values
        result: dict[str, float] = {}
        for part in self._gather(values):
            for name, value in part.items():
                if name.endswith("_max"):
                    result[name] = max(result.get(name, value), value)
                else:
                    result[name] = result.get(name, 0.0) + value
        return result

    def _gather(self, value: T) -> list[T]:
        """A value of every rank, by rank."""
        gathered = [value] * self.world_size
        if self.world_size > 1:
            torch.distributed.all_gather_object(gathered, value)
        return gathered

    def _step_stats(self, sums: dict[str, float], denominator: float) -> dict[str, float]:
        sampled = max(sums.get("mismatch/tokens", 0.0), 1.0)
        stats = {name: value for name, value in sums.items() if name.startswith(("train/", "tokens/", "window/"))}
        stats |= {
            "train/loss": sums.get("loss", 0.0) / denominator,
            "train/mismatch_prob": sums.get("mismatch/prob", 0.0) / sampled,
            "train/mismatch_logprob_mean": sums.get("mismatch/logprob", 0.0) / sampled,
        }
        return stats | self._window_stats() | self._memory_stats()

    def _window_stats(self) -> dict[str, float]:
        times = TIMELINE.reset()
        window = self.window.reset()
        self.job_seconds = window.seconds
        times |= {f"job_{kind}": window.of(kind) for kind in JOB_KINDS}
        if self.window.schedule.window and self._fallback.loses(window.overlap_efficiency):
            logger.warning("overlap does not pay here (efficiency %.2f): serial from now on", window.overlap_efficiency)
            self.use_schedule("serial")
        return {f"time/{name}_s": seconds for name, seconds in times.items()} | {
            "window/jobs": float(window.jobs),
            "window/hidden_s": window.hidden_s,
            "window/spill_s": window.at("after"),
            "window/overlap_efficiency": window.overlap_efficiency,
            "window/fallback": float(self._fallback.enabled and not self.window.schedule.window),
        }

    def _memory_stats(self) -> dict[str, float]:
        stats = {f"hbm/{name}_bytes": float(size) for name, size in self.ledger.buffer_peaks.items()}
        stats["hbm/peak_bytes"] = float(max(self.ledger.peaks.values()))
        if torch.cuda.is_available():  # of the whole run, by PyTorch's count, in which vLLM's KV cache is not
            stats["hbm/allocated_peak_bytes"] = float(torch.cuda.max_memory_allocated())
        stats["hbm/planned_peak_bytes"] = float(max(self.plan.peak(phase) for phase in PHASES))
        return stats

    def forget_times(self) -> None:
        """Leave what was done since the last update, such as an evaluation, out of the next one's times."""
        TIMELINE.clear()
        self.lane.seconds()

    def stats(self) -> dict[str, float]:
        """Numbers of the last update, over all ranks (seconds and bytes are this rank's)."""
        return dict(self._stats)

    # --- persistence -------------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Write weights, optimizer and reference. Every rank calls it; its part goes into the same folder."""
        self._sleep()
        with self._scattered(), self._optimizer_room():
            self.trainer.save(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if self.updater.reference is not None and self.rank == 0:
            torch.save(self.updater.reference.model.state_dict(), folder / "reference.pt")
        if self.rank == 0:
            state = {"policy_version": self.policy_version, "world_size": self.world_size}
            torch.save(state, folder / "runtime.pt")

    def load(self, folder: Path, *, weights_only: bool = False) -> None:
        """Continue from what `save` wrote.

        Args:
            weights_only: to evaluate the policy: no optimizer and no reference.

        Raises:
            FileNotFoundError: the folder lacks a part.
            UserError: it was saved by another number of ranks, which matters but for the weights of ZeRO 0 to 2.
        """
        state = torch.load(folder / "runtime.pt")
        if state["world_size"] != self.world_size and (self.trainer.stage == 3 or not weights_only):
            raise UserError(
                f"checkpoint {folder} was saved by {state['world_size']} ranks and this run has {self.world_size}: "
                f"start it with torchrun --nproc_per_node {state['world_size']} run.py ..."
            )
        self._sleep()
        with self._scattered(), self._optimizer_room():
            self.trainer.load(folder, weights_only=weights_only)
        self.vision.forget(self.actor.tower)
        if self.config.rl.kl_coef > 0 and not weights_only:
            self.start_rl()
            assert self.updater.reference is not None
            self.updater.reference.model.load_state_dict(torch.load(folder / "reference.pt"))
            if self._reference_copy is not None:
                self._reference_copy.refresh()
        self.policy_version = self.actor.version = state["policy_version"]
        self.updater.prefills.drop()
        if self._engine is not None:
            self._engine.publish(self.policy_version)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _device() -> torch.device:
    """This rank's device."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return torch.device("cuda", torch.cuda.current_device())


def _device_bytes() -> int:
    """Memory of the device; 0 where the host's own memory is used."""
    return (
        torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory if torch.cuda.is_available() else 0
    )
