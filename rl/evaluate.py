"""Success on a fixed list of held-out episodes: with its interval, path efficiency, a record of each, and videos.

The same code measures the policy, the environment's expert and chance. Knows nothing about training.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from jaxtyping import UInt8

from agent.models import resolve_model
from configs.errors import RunInterrupted, UserError
from configs.schema import RunConfig
from data.task_sampler import stable_seed
from data.types import Rollout, Sampling, TurnKey
from data.video import caption_frames, write_filmstrips, write_mp4
from envs.pool import EnvPool, EnvResult
from envs.registration import heldout_manifest
from rl.checkpoint import incomplete_reason, latest_complete
from rl.interfaces import Measured, Pool, Ranks
from rl.metrics import write_json
from rl.players import Player, ScriptedPlayer, expert_choice, random_choice
from rl.rollout import Job, Lost, run_episodes
from rl.scores import LOST, EpisodeResult, Evaluation, summarize
from rl.signals import StopSignals
from rl.sources import asks_questions, open_source

logger = logging.getLogger(__name__)


class Alone:
    """One process, for players that need no runtime."""

    rank = 0
    world_size = 1

    def all_reduce(self, values: dict[str, float]) -> dict[str, float]:
        """There is nobody to add."""
        return values


def evaluate(
    config: RunConfig,
    pool: Pool,
    player: Player,
    ranks: Ranks,
    folder: Path,
    *,
    videos: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Play the held-out episodes, every rank its share; rank 0 writes `results.json`, each rank its videos.

    Args:
        videos: episodes, from the first, whose mp4 is written (count); None: `eval.videos`.

    Returns:
        The same numbers on every rank; None where a rank was asked to stop, and no results are written then.

    Raises:
        UserError: every episode was lost to faults of the environment.
    """
    manifest = heldout_manifest(config.env, config.eval.episodes, config.eval.manifest_seed, pool.heldout)
    recorder = Recorder(config.eval.videos if videos is None else videos, folder / "videos", config.agent.fps)
    mine = list(enumerate(manifest))[ranks.rank :: ranks.world_size]
    lost: list[Lost] = []
    # In waves: which responses are decoded side by side changes their last bits, and now and then a greedy token.
    in_waves = replace(config, rollout=replace(config.rollout, deterministic=True))
    rollouts = run_episodes(mine, pool, player, in_waves, should_stop=should_stop, watch=recorder, lost=lost)
    stopped = float(len(rollouts) + len(lost) < len(mine))
    records = {index: _episode_result(rollout) for index, rollout in rollouts.items()}
    results = _gather(records | {item.job.group: LOST for item in lost}, len(manifest), ranks, stopped)
    if results is None:
        return None
    if all(result.lost for result in results):
        reason = f" The first of this rank: {lost[0].reason}" if lost else ""
        raise UserError(f"all {len(results)} episodes were lost to faults of the environment.{reason}")
    evaluation = summarize(manifest, results)
    folder.mkdir(parents=True, exist_ok=True)
    recorder.close()
    if ranks.rank == 0:
        recorder.remove_older(len(manifest))
        write_json(folder / "results.json", asdict(evaluation) | {"manifest_seed": config.eval.manifest_seed})
    return evaluation


def evaluate_command(
    config: RunConfig, checkpoint: str | None, policy: str, videos: int | None = None
) -> dict[str, Any]:
    """`run.py eval`: measure the policy ("model"), an environment's "expert", or "random" actions.

    Args:
        checkpoint: a checkpoint, a run folder whose newest one is taken, or a Hugging Face folder; None takes
            `model.path` as it is.
        videos: episodes, from the first, whose mp4 is written (count); None: `eval.videos`.

    Raises:
        UserError: there is no complete checkpoint, or the model or environment cannot be used.
        RunInterrupted: a signal asked it to stop.
    """
    source = None
    if checkpoint and (Path(checkpoint) / "config.json").is_file():
        config = replace(config, model=replace(config.model, path=checkpoint))
    elif checkpoint:
        source = _complete_checkpoint(Path(checkpoint))
    name = policy if policy != "model" or not checkpoint else results_name(source or Path(checkpoint), config.run_dir)
    folder = Path(config.run_dir) / "eval" / name
    done: Measured | None
    with StopSignals() as stop:
        if policy == "model":
            done = _evaluate_model(config, source, folder, stop, videos)
        else:
            done = _evaluate_baseline(config, policy, folder, stop, videos)
    if done is None:
        raise RunInterrupted(stop.signum, "the evaluation was stopped, and no results were written")
    values = asdict(cast(Any, done))
    del values["episodes"]
    return values | {"results": str(folder / "results.json")}


def _evaluate_model(
    config: RunConfig, checkpoint: Path | None, folder: Path, stop: StopSignals, videos: int | None
) -> Measured | None:
    model_dir = resolve_model(config.model.path, Path(config.run_dir) / "model")
    with open_source(config, model_dir, stop.requested) as source:
        if checkpoint is not None:
            source.runtime.load(checkpoint / "runtime", weights_only=True)
        return source.evaluate(folder, videos)


def _evaluate_baseline(
    config: RunConfig, policy: str, folder: Path, stop: StopSignals, videos: int | None
) -> Evaluation | None:
    if asks_questions(config):
        raise UserError(f"--policy {policy} plays in an environment; questions of data.eval are answered by the model")
    expert = policy == "expert"
    with EnvPool(config.env, with_expert=expert, max_actions=config.agent.max_actions) as pool:
        choose = (expert_choice if expert else random_choice)(pool.action_names)
        player = ScriptedPlayer(choose, None)
        return evaluate(config, pool, player, Alone(), folder, videos=videos, should_stop=stop.requested)


def results_name(model: Path, run_dir: str) -> str:
    """What the results of a checkpoint or model folder are called: with its run's name, where that is another run."""
    model = model.resolve()
    run = model.parents[1] if model.parent.name == "checkpoints" else model.parent
    return model.name if run == Path(run_dir).resolve() else f"{run.name}-{model.name}"


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


PICTURED = 4
"""Episodes of the manifest, from the first, that `episodes.png` shows (count)."""


class Recorder:
    """Writes the first episodes of the manifest as videos, the action and the reward drawn in, each when it ends."""

    def __init__(self, num_episodes: int, folder: Path, fps: float) -> None:
        self._num_episodes, self._folder, self._fps = num_episodes, folder, fps
        self._clips: dict[int, list[UInt8[np.ndarray, "frame tall wide 3"]]] = {}
        self._shown: dict[int, UInt8[np.ndarray, "frame tall wide 3"]] = {}

    def __call__(self, job: Job, result: EnvResult, actions: tuple[str, ...]) -> None:
        """Take in one result of an episode, with the actions that led to it."""
        if job.group >= self._num_episodes:
            return
        clips = self._clips.setdefault(job.group, [])
        did = " ".join(actions) if actions else ("nothing" if clips else "start")
        over = result.terminated or result.truncated
        end = "success" if result.info.get("success") else "ended" if over else ""
        lines = (result.instruction, f"turn {len(clips)}: {did}", f"reward {result.reward:+.3f} {end}")
        clips.append(caption_frames(np.array(result.clip), lines))
        if over:
            self._write(job.group)

    def close(self) -> None:
        """Write those that ended without a result: by a limit, an invalid response, or lost."""
        for index in sorted(self._clips):
            self._write(index)
        if self._shown:
            write_filmstrips(self._folder / "episodes.png", [self._shown[index] for index in sorted(self._shown)])

    def remove_older(self, num_episodes: int) -> None:
        """Remove what an earlier evaluation recorded of episodes that this one does not: it has other numbers."""
        kept = {f"episode_{index:03d}.mp4" for index in range(min(self._num_episodes, num_episodes))}
        for file in self._folder.glob("episode_*.mp4"):
            if file.name not in kept:
                file.unlink()

    def _write(self, index: int) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        frames = np.concatenate(self._clips.pop(index))
        write_mp4(self._folder / f"episode_{index:03d}.mp4", frames, self._fps)
        if index < PICTURED:
            self._shown[index] = frames


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
        distance_m=float(rollout.info.get("distance_m", math.nan)),
        scene=str(rollout.info.get("scene", "")),
        task=str(rollout.info.get("task", "")),
    )


def _gather(mine: dict[int, EpisodeResult], count: int, ranks: Ranks, stopped: float) -> list[EpisodeResult] | None:
    """Every rank's episodes in manifest order: each value is 0 on all ranks but one, so a sum is a gather."""
    texts = ("scene", "task")
    names = [name for name in EpisodeResult.__dataclass_fields__ if name not in texts]
    values = {
        f"{index}/{name}": getattr(mine[index], name) if index in mine else 0.0
        for index in range(count)
        for name in names
    }
    for index, result in mine.items():  # a text is the end of a key that other ranks lack
        values |= {f"{index}/{name}={text}": 1.0 for name in texts if (text := getattr(result, name))}
    total = ranks.all_reduce(values | {"stopped_max": stopped})
    if total["stopped_max"]:
        return None
    told: dict[int, dict[str, str]] = {index: {} for index in range(count)}
    for key in total:
        place, name, text = _split_key(key)
        if name in texts:
            told[place][name] = text
    return [
        EpisodeResult(**{name: total[f"{index}/{name}"] for name in names}, **told[index])  # type: ignore[arg-type]
        for index in range(count)
    ]


def _split_key(key: str) -> tuple[int, str, str]:
    """Index, field and text of a gathered key."""
    index, _, rest = key.partition("/")
    name, _, text = rest.partition("=")
    return int(index) if index.isdigit() else -1, name, text
