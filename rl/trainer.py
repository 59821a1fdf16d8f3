"""The main loop: warm start, then rollouts and updates in turn, evaluated before and after.

Owns the order of things and the run's folder; what a rollout, a loss or an update is, other files know.
"""

from __future__ import annotations

import copy
import logging
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from agent.models import resolve_model
from configs.errors import RunInterrupted, UserError
from configs.load import save_config
from configs.schema import RunConfig
from data.types import Group
from rl.checkpoint import Progress, load_checkpoint, prepare_run_folder, rng_state, save_checkpoint
from rl.doctor import check_parity
from rl.interfaces import Cursors, Measured, Source
from rl.losses import Scale, batch_std, batch_sums, imitation_loss, needs_batch, policy_loss
from rl.metrics import MetricsLog, add_stats, per_token, rollout_metrics, rollout_sums, warn_if_cut, write_json
from rl.signals import StopSignals
from rl.sources import asks_questions, open_source
from runtime.tracing import TIMELINE

logger = logging.getLogger(__name__)


def train(config: RunConfig) -> dict[str, Any]:
    """Run the job that a config describes; returns what `summary.json` holds.

    Raises:
        UserError: the run folder, the model, the environment or the sets cannot be used.
        ParityError: vLLM and the trainer differ.
        RunInterrupted: a signal asked the run to stop, and it has saved a checkpoint.
    """
    if asks_questions(config) and not config.data.train:
        raise UserError("no rows to train on: name files in data.train (`run.py eval` needs data.eval alone)")
    checkpoint = prepare_run_folder(config)
    model_dir = resolve_model(config.model.path, Path(config.run_dir) / "model")
    with ExitStack() as stack:
        stack.enter_context(logging_redirect_tqdm())
        stop = stack.enter_context(StopSignals())
        source = stack.enter_context(open_source(config, model_dir, stop.requested))
        if config.runtime.doctor and checkpoint is None:
            check_parity(config, source)
        run = Trainer(config, source, stop)
        run.resume(checkpoint)
        if run.imitation_left:
            with source.teacher():
                run.imitate()
        run.reinforce()
        return run.summarize()


class Moment(NamedTuple):
    """Everything a step changes before its update, as it was when the step began."""

    progress: Progress
    rng: dict[str, Any]


class Trainer:
    """One run on one rank. All ranks make the same steps, each with its share of what the source has."""

    def __init__(self, config: RunConfig, source: Source, stop: StopSignals) -> None:
        self.config = config
        self.source = source
        self.runtime = runtime = source.runtime
        self.stop = stop
        self.folder = Path(config.run_dir)
        self.progress = Progress()
        TIMELINE.recording = config.runtime.trace
        self.log = MetricsLog(self.folder / "metrics.jsonl", enabled=runtime.rank == 0)
        self._last: Measured | None = None
        self._warned = False
        self._since = time.perf_counter()

    def resume(self, checkpoint: Path | None) -> None:
        """Continue from a checkpoint, or begin."""
        if checkpoint is not None:
            self.progress = load_checkpoint(checkpoint, self.runtime)
            self.source.load_cursors(Cursors(self.progress.imitation_sampler, self.progress.sampler))
            logger.info("continuing %s from checkpoint %s", self.folder, checkpoint.name)
        self.log.start(self.progress.phase, self.progress.step)
        if self.runtime.rank == 0:
            save_config(self.config, self.folder / "config.yaml")
        self._note_progress()

    @property
    def imitation_left(self) -> int:
        """Steps of the warm start that are still to be made (count)."""
        return max(self.config.imitation.steps - self.progress.step, 0) if self.progress.phase == "imitation" else 0

    def imitate(self) -> None:
        """The warm start: cross-entropy on the source's demonstrations."""
        config, runtime, progress = self.config, self.runtime, self.progress
        with self._bar("imitation", config.imitation.steps) as bar:
            while self.imitation_left:
                begin = self._moment()
                groups = self.source.demonstrations(progress.step)
                for group in groups:
                    runtime.train_on(group, imitation_loss(group))
                self._leave_if_asked(begin)
                self._require_any(groups)
                runtime.update(config.imitation.lr)
                self._finish_step(groups, runtime.stats(), bar)

    def reinforce(self) -> None:
        """Alternate rollouts and updates until `steps` are done, and evaluate on the way."""
        config, runtime, progress = self.config, self.runtime, self.progress
        if progress.phase == "imitation":
            self._begin_rl()
        with self._bar("rl", config.steps) as bar:
            self._evaluate_if_due()
            while progress.step < config.steps:
                begin = self._moment()
                groups = []
                for group in self.source.groups(progress.step):
                    if not needs_batch(config.rl):
                        self._train_on(group)  # a finished group, others still decode
                    groups.append(group)
                self._leave_if_asked(begin)
                self._require_any(groups)
                if needs_batch(config.rl):
                    self._train_on_batch(groups)
                runtime.update(self._learning_rate())  # optimizer step, new policy_version, old encodings dropped
                stats = runtime.stats()
                for _ in range(config.rl.epochs - 1):
                    self._train_on_batch(groups)
                    runtime.update(self._learning_rate())
                    stats = add_stats(stats, runtime.stats())
                self._finish_step(groups, stats, bar)
                self._evaluate_if_due()

    def summarize(self) -> dict[str, Any]:
        """Write `summary.json`: what the run was for, what it came to and what it took."""
        before, after, totals = self.progress.before, self._last, self.progress.totals
        assert before is not None
        assert after is not None
        hidden, spilled = totals.get("window/hidden_s", 0.0), totals.get("window/spill_s", 0.0)
        self._note_wall_time()
        summary = {
            "success_before": before["success"],
            "success_before_ci95": before["success_ci95"],
            "success_after": after.success,
            "success_after_ci95": list(after.success_ci95),
            "spl_before": before["spl"],
            "spl_after": after.metrics().get("eval/spl"),
            "best": self.progress.best,
            "steps": self.progress.step,
            "wall_s": totals["wall_s"],
            "weights_shared_fraction": self.runtime.weights_shared_fraction,
            "window_hidden_fraction": hidden / (hidden + spilled) if hidden + spilled > 0 else 0.0,
            "tokens_trained": totals.get("tokens/trained", 0.0),
            "tokens_naive": totals.get("tokens/naive", 0.0),
        }
        if self.runtime.rank == 0:
            write_json(self.folder / "summary.json", summary)
            logger.info("%s", summary_line(summary))
        return summary

    def _begin_rl(self) -> None:
        """The actor as the warm start left it becomes the reference."""
        if self.config.rl.kl_coef > 0:
            self.runtime.start_rl()
        self.progress.phase, self.progress.step = "rl", 0
        if self.config.imitation.steps > 0 and self.config.save_every > 0:
            save_checkpoint(self.config, self.runtime, self.progress)

    # --- pieces of a step --------------------------------------------------------------------------------------------

    def _train_on(self, group: Group, batch_std: float = 1.0) -> None:
        longest = self.source.max_turns * self.config.rollout.max_tokens
        self.runtime.train_on(group, policy_loss(self.config.rl, group, Scale(longest, batch_std)))

    def _train_on_batch(self, groups: Sequence[Group]) -> None:
        """Register all groups at once; every rank comes here."""
        std = batch_std(self.runtime.all_reduce(batch_sums(groups)))
        for group in groups:
            self._train_on(group, std)

    def _learning_rate(self) -> float:
        """Rises linearly over the first `train.warmup_steps` steps, and falls to the last with `train.decay`."""
        train, step = self.config.train, self.progress.step
        rise = min(1.0, (step + 1) / max(train.warmup_steps, 1))
        fall = 1.0 - step / self.config.steps if train.decay == "linear" else 1.0
        return train.lr * rise * fall

    def _require_any(self, groups: Sequence[Group]) -> None:
        """Stop where faults leave no rank anything to learn from: that is no bad luck any more."""
        lost = self.source.lost
        if not self.runtime.all_reduce({"groups": float(len(groups))})["groups"]:
            reason = f" The first of this rank: {lost[0].reason}" if lost else ""
            raise UserError(
                f"{self.progress.phase} step {self.progress.step}: no group is whole, {len(lost)} episodes were lost "
                f"to faults.{reason}"
            )

    def _finish_step(self, groups: Sequence[Group], stats: dict[str, float], bar: tqdm[Any]) -> None:
        """Count the step, write its numbers, save if it is time."""
        progress = self.progress
        progress.step += 1
        self._note_progress()
        sums = self.runtime.all_reduce(rollout_sums(groups, len(self.source.lost)))
        metrics = rollout_metrics(sums) | per_token(stats) | self.source.metrics()
        if progress.phase == "rl":
            kept = {key: stats[key] for key in stats if key.startswith(("tokens/", "window/"))}
            progress.totals = add_stats(progress.totals, kept)
            metrics.setdefault("train/kl", float("nan"))  # no reference: written as null
        seconds = self._note_wall_time()
        order = {"train/order": list(self.runtime.train_order)} if progress.phase == "rl" else {}
        self.log.write(progress.phase, progress.step, metrics | {"time/step_s": seconds} | order)
        if self.config.runtime.trace and self.runtime.rank == 0:
            TIMELINE.write(self.folder / "trace.json")
        bar.update()
        logger.info("%s", step_line(progress, bar.total, metrics, seconds))
        if progress.phase == "rl" and self.runtime.rank == 0 and not self._warned:
            self._warned = warn_if_cut(metrics, self.config.rollout.max_tokens)
        if _is_due(progress.step, self.config.save_every, bar.total):
            save_checkpoint(self.config, self.runtime, progress)

    def _evaluate_if_due(self) -> None:
        """Measure held-out success before the first step, after the last, and as often as `eval_every` says."""
        config, progress, step = self.config, self.progress, self.progress.step
        if step > 0 and not _is_due(step, config.eval_every, config.steps):
            return
        begin = self._moment()
        done = self.source.evaluate(self.folder / "eval" / f"step_{step:06d}")
        if done is None:
            self._leave(begin)
        assert done is not None
        self._last = done
        record = {"step": step, "success": done.success, "success_ci95": list(done.success_ci95)}
        record["spl"] = done.metrics().get("eval/spl")
        if step == 0:
            progress.before = record
        if progress.best is None or done.success > progress.best["success"]:
            progress.best = record
        self.runtime.forget_times()
        seconds = self._note_wall_time()
        self.log.write("rl", step, done.metrics() | {"time/eval_s": seconds})
        logger.info("%s", evaluation_line(step, done, seconds))

    # --- stopping and keeping ----------------------------------------------------------------------------------------

    def _moment(self) -> Moment:
        self._note_progress()
        return Moment(copy.deepcopy(self.progress), rng_state())

    def _leave_if_asked(self, begin: Moment) -> None:
        """Stop where any rank was asked to: all of them come here once a step, so all of them agree."""
        if self.runtime.all_reduce({"stop_max": float(self.stop.requested())})["stop_max"]:
            self._leave(begin)

    def _leave(self, begin: Moment) -> None:
        """Save the run as it was when the unfinished step began: a resumed run makes that step whole."""
        folder = save_checkpoint(self.config, self.runtime, begin.progress, begin.rng)
        raise RunInterrupted(
            self.stop.signum or signal.SIGTERM,  # 0 where another rank was asked
            f"stopped after {begin.progress.phase} step {begin.progress.step}, saved {folder}; "
            "the same command with resume=auto continues it",
        )

    def _note_progress(self) -> None:
        self.progress.imitation_sampler, self.progress.sampler = self.source.cursors()

    def _note_wall_time(self) -> float:
        """Add the time since the last call to the run's total, and return it (s)."""
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        self.progress.totals["wall_s"] = self.progress.totals.get("wall_s", 0.0) + seconds
        return seconds

    def _bar(self, phase: str, total: int) -> tqdm[Any]:
        """A progress bar on rank 0's terminal, and none in a log file."""
        quiet = True if self.runtime.rank != 0 else None
        return tqdm(desc=phase, total=total, initial=self.progress.step, disable=quiet, unit="step", dynamic_ncols=True)


def step_line(progress: Progress, total: int, metrics: dict[str, float], seconds: float) -> str:
    """A step in one line."""
    if progress.phase == "imitation":
        shown = f"loss {metrics['train/loss']:.4f}  p(expert) {metrics.get('train/probability', 0.0):.3f}"
    else:
        shown = (
            f"reward {metrics['rollout/reward_mean']:.3f}  success {metrics['rollout/success']:.3f}  "
            f"invalid {metrics['rollout/invalid_actions']:.3f}  loss {metrics['train/loss']:+.4f}"
        )
    return f"{progress.phase} {progress.step}/{total}  {shown}  grad {metrics['train/grad_norm']:.3f}  {seconds:.1f} s"


def evaluation_line(step: int, done: Measured, seconds: float) -> str:
    """An evaluation in one line."""
    return f"eval at step {step}: success {_share_text(done.success, done.success_ci95)}, {seconds:.1f} s"


def summary_line(summary: dict[str, Any]) -> str:
    """The run in one line."""
    before = _share_text(summary["success_before"], summary["success_before_ci95"])
    after = _share_text(summary["success_after"], summary["success_after_ci95"])
    spl = "" if summary["spl_after"] is None else f", SPL {summary['spl_after']:.2f}"
    return (
        f"held-out success {before} -> {after}{spl} after {summary['steps']} steps in {summary['wall_s']:.0f} s; "
        f"{100 * summary['weights_shared_fraction']:.1f} % of vLLM's weights are the trainer's own memory"
    )


def _share_text(share: float, interval: Sequence[float]) -> str:
    return f"{100 * share:.1f} % [{100 * interval[0]:.1f}, {100 * interval[1]:.1f}]"


def _is_due(step: int, every: int, last: int) -> bool:
    """True every `every` steps, and at the last one; 0 is at the last one only."""
    return step >= last or (every > 0 and step % every == 0)
