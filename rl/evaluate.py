"""Success on a fixed list of held-out episodes: with its interval, path efficiency, a record of each, and videos.

The same code measures the policy, the environment's expert and chance. Knows nothing about training.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from agent.models import resolve_model
from agent.policy import VLMPolicy
from configs.errors import RunInterrupted, UserError
from configs.schema import RunConfig
from data.task_sampler import stable_seed
from data.types import Rollout, Sampling, TurnKey
from data.video import caption_frames, write_mp4
from envs.pool import EnvPool, EnvResult
from envs.registration import Episode, heldout_manifest
from rl.checkpoint import incomplete_reason, latest_complete
from rl.interfaces import Pool, Ranks
from rl.metrics import write_json
from rl.players import ModelPlayer, Player, ScriptedPlayer, expert_choice, random_choice
from rl.rollout import Job, run_episodes
from rl.signals import StopSignals

logger = logging.getLogger(__name__)

Z_95 = 1.959963984540054
"""97.5 % quantile of the normal distribution."""
ZERO_LENGTH_SPL = 1.0
"""SPL of a success that started at its goal and stood still, where the formula says 0 / 0."""


class Alone:
    """One process, for players that need no runtime."""

    rank = 0
    world_size = 1

    def all_reduce(self, values: dict[str, float]) -> dict[str, float]:
        """There is nobody to add."""
        return values


@dataclass(frozen=True)
class EpisodeResult:
    """What one held-out episode came to; all numbers, so that ranks can add them up."""

    success: float
    reward: float
    truncated: float
    turns: float
    env_steps: float
    invalid_actions: float
    path_length_m: float
    """Metres walked; NaN where the environment does not say."""
    geodesic_m: float
    """Shortest path from the start (m); NaN where the environment does not say."""


@dataclass(frozen=True)
class Evaluation:
    """Means over the manifest."""

    success: float
    success_ci95: tuple[float, float]
    """Wilson's 95 % interval of `success`."""
    spl: float | None
    """None where no episode has a path length to compare with."""
    spl_excluded: int
    """Episodes left out of `spl`: no path leads to their goal, or the environment measures none (count)."""
    reward_mean: float
    truncated: float
    turns_mean: float
    env_steps_mean: float
    invalid_actions: float
    """Share of turns whose response did not parse."""
    episodes: tuple[dict[str, Any], ...]

    def metrics(self) -> dict[str, float | None]:
        """`eval/*` for the metrics file."""
        named = asdict(self)
        low, high = named.pop("success_ci95")
        del named["episodes"]
        return {f"eval/{key}": value for key, value in named.items()} | {
            "eval/success_low": low,
            "eval/success_high": high,
        }


def evaluate(
    config: RunConfig,
    pool: Pool,
    player: Player,
    ranks: Ranks,
    folder: Path,
    *,
    should_stop: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Play the held-out episodes, every rank its share; rank 0 writes `results.json`, each rank its videos.

    Returns:
        The same numbers on every rank; None where a rank was asked to stop, and nothing is written then.
    """
    manifest = heldout_manifest(config.env, config.eval.episodes, config.eval.manifest_seed)
    recorder = Recorder(config.eval.videos)
    mine = list(enumerate(manifest))[ranks.rank :: ranks.world_size]
    rollouts = run_episodes(mine, pool, player, config, should_stop=should_stop, watch=recorder)
    stopped = float(len(rollouts) < len(mine))
    results = _gather(
        {index: _episode_result(rollout) for index, rollout in rollouts.items()}, len(manifest), ranks, stopped
    )
    if results is None:
        return None
    evaluation = summarize(manifest, results)
    folder.mkdir(parents=True, exist_ok=True)
    recorder.write(folder / "videos", config.agent.fps)
    if ranks.rank == 0:
        write_json(folder / "results.json", asdict(evaluation) | {"manifest_seed": config.eval.manifest_seed})
    return evaluation


def evaluate_command(config: RunConfig, checkpoint: str | None, policy: str) -> dict[str, Any]:
    """`run.py eval`: measure the policy ("model"), the environment's "expert", or "random" actions.

    Args:
        checkpoint: a checkpoint, or a run folder whose newest one is taken; None takes `model.path` as it is.

    Raises:
        UserError: there is no complete checkpoint, or the model or environment cannot be used.
        RunInterrupted: a signal asked it to stop.
    """
    source = _complete_checkpoint(Path(checkpoint)) if checkpoint else None
    name = policy if policy != "model" or source is None else source.name
    folder = Path(config.run_dir) / "eval" / name
    expert = policy == "expert"
    with (
        StopSignals() as stop,
        EnvPool(config.env, with_expert=expert, max_actions=config.agent.max_actions) as pool,
    ):
        if policy == "model":
            done = _evaluate_model(config, pool, source, folder, stop)
        else:
            choose = (expert_choice if expert else random_choice)(pool.action_names)
            done = evaluate(config, pool, ScriptedPlayer(choose, None), Alone(), folder, should_stop=stop.requested)
    if done is None:
        raise RunInterrupted(stop.signum, "the evaluation was stopped, and nothing was written")
    values = asdict(done)
    del values["episodes"]
    return values | {"results": str(folder / "results.json")}


def _evaluate_model(
    config: RunConfig, pool: Pool, checkpoint: Path | None, folder: Path, stop: StopSignals
) -> Evaluation | None:
    from runtime.rollplex import Rollplex  # the baselines need no model, so they do not wait for vLLM's import

    model_dir = resolve_model(config.model.path, Path(config.run_dir) / "model")
    policy = VLMPolicy(config.agent, model_dir, pool.action_names)
    with Rollplex(config, model_dir, policy.vocabulary) as runtime:
        if checkpoint is not None:
            runtime.load(checkpoint / "runtime")
        player = ModelPlayer(policy, runtime, eval_sampling(config), train=False)
        return evaluate(config, pool, player, runtime, folder, should_stop=stop.requested)


def _complete_checkpoint(path: Path) -> Path:
    """The checkpoint at a path, or the newest one of the run at a path."""
    if (path / "checkpoints").is_dir():
        newest = latest_complete(path)
        if newest is None:
            raise UserError(f"run folder {path} holds no complete checkpoint. Name another one with --checkpoint")
        return newest
    if problem := incomplete_reason(path):
        raise UserError(
            f"checkpoint {path} cannot be used: {problem}. Name a folder such as RUN_DIR/checkpoints/rl_000010"
        )
    return path


def eval_sampling(config: RunConfig) -> Callable[[TurnKey], Sampling]:
    """How a response is sampled in evaluation: greedy, or seeded by its place, so that a second look sees the same."""

    def sampling(key: TurnKey) -> Sampling:
        temperature = config.eval.temperature
        seed = stable_seed(config.eval.manifest_seed, *key) if temperature > 0 else None
        return Sampling(config.rollout.max_tokens, temperature, seed)

    return sampling


def summarize(manifest: Sequence[Episode], results: Sequence[EpisodeResult]) -> Evaluation:
    """Means, intervals and one record an episode; never NaN."""
    count = len(results)
    lengths = [spl(result.success > 0, result.geodesic_m, result.path_length_m) for result in results]
    counted = [value for value in lengths if value is not None]
    turns = sum(result.turns for result in results)
    successes = round(sum(result.success for result in results))

    def mean(values: Sequence[float]) -> float:
        return math.fsum(values) / count

    return Evaluation(
        success=successes / count,
        success_ci95=wilson_interval(successes, count),
        spl=math.fsum(counted) / len(counted) if counted else None,
        spl_excluded=count - len(counted),
        reward_mean=mean([result.reward for result in results]),
        truncated=mean([result.truncated for result in results]),
        turns_mean=turns / count,
        env_steps_mean=mean([result.env_steps for result in results]),
        invalid_actions=sum(result.invalid_actions for result in results) / max(turns, 1),
        episodes=tuple(
            {"id": episode.id, "seed": episode.seed, "spl": length} | _plain(result)
            for episode, result, length in zip(manifest, results, lengths, strict=True)
        ),
    )


def spl(success: bool, geodesic_m: float, path_length_m: float) -> float | None:
    """Success weighted by path length, success * l / max(l, p) (Anderson et al. 2018, arXiv:1807.06757).

    Returns:
        `ZERO_LENGTH_SPL` for a success with l = p = 0; 0 for l = 0 and p > 0, as the formula says; None where a length
        is infinite or unknown: such an episode is left out of the mean and counted.
    """
    if not (math.isfinite(geodesic_m) and math.isfinite(path_length_m)):
        return None
    if not success:
        return 0.0
    longest = max(geodesic_m, path_length_m)
    return geodesic_m / longest if longest > 0 else ZERO_LENGTH_SPL


def wilson_interval(successes: int, count: int) -> tuple[float, float]:
    """Wilson's 95 % score interval of a share (E. B. Wilson 1927); never leaves [0, 1]."""
    share, z2 = successes / count, Z_95**2
    center = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = Z_95 / (1 + z2 / count) * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2))
    return max(center - half, 0.0), min(center + half, 1.0)


class Recorder:
    """Keeps the frames of the first episodes of the manifest, captioned, until they are written."""

    def __init__(self, num_episodes: int) -> None:
        self._num_episodes = num_episodes
        self._clips: dict[int, list[UInt8[np.ndarray, "frame tall wide 3"]]] = {}

    def __call__(self, job: Job, result: EnvResult, actions: tuple[str, ...]) -> None:
        """Take in one result of an episode, with the actions that led to it."""
        if job.group >= self._num_episodes:
            return
        clips = self._clips.setdefault(job.group, [])
        did = " ".join(actions) if actions else ("nothing" if clips else "start")
        end = "success" if result.info.get("success") else "ended" if result.terminated or result.truncated else ""
        lines = (result.instruction, f"turn {len(clips)}: {did}", f"reward {result.reward:+.3f} {end}")
        clips.append(caption_frames(np.array(result.clip), lines))

    def write(self, folder: Path, fps: float) -> None:
        """One mp4 an episode."""
        for index, clips in sorted(self._clips.items()):
            folder.mkdir(parents=True, exist_ok=True)
            write_mp4(folder / f"episode_{index:03d}.mp4", np.concatenate(clips), fps)


def _episode_result(rollout: Rollout) -> EpisodeResult:
    return EpisodeResult(
        success=float(rollout.success),
        reward=rollout.reward,
        truncated=float(rollout.truncated),
        turns=float(len(rollout.turns)),
        env_steps=float(rollout.info["env_steps"]),
        invalid_actions=float(sum(turn.invalid for turn in rollout.turns)),
        path_length_m=float(rollout.info.get("path_length_m", math.nan)),
        geodesic_m=float(rollout.info.get("geodesic_m", math.nan)),
    )


def _gather(mine: dict[int, EpisodeResult], count: int, ranks: Ranks, stopped: float) -> list[EpisodeResult] | None:
    """Every rank's episodes in manifest order: each value is 0 on all ranks but one, so a sum is a gather."""
    names = list(EpisodeResult.__dataclass_fields__)
    values = {
        f"{index}/{name}": getattr(mine[index], name) if index in mine else 0.0
        for index in range(count)
        for name in names
    }
    total = ranks.all_reduce(values | {"stopped_max": stopped})
    if total["stopped_max"]:
        return None
    return [EpisodeResult(**{name: total[f"{index}/{name}"] for name in names}) for index in range(count)]


def _plain(result: EpisodeResult) -> dict[str, Any]:
    """JSON's values: flags as booleans, unknown or infinite lengths as null."""
    values: dict[str, Any] = {name: value if math.isfinite(value) else None for name, value in asdict(result).items()}
    return values | {"success": bool(result.success), "truncated": bool(result.truncated)}
