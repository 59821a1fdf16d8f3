"""Episodes from reset to end: simulators step in the pool while the player decides other episodes' turns.

One loop serves training rollouts, evaluation, and the expert's demonstrations; they differ in who plays and in how
records are grouped. Knows nothing about losses or the optimizer.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from agent.policy import Observation
from configs.errors import UserError
from configs.schema import RunConfig
from data.task_sampler import Task, stable_seed
from data.types import Group, Rollout, Sampling, Turn, TurnKey
from envs.pool import EnvResult
from envs.registration import Episode
from rl.interfaces import Decoder, Policy, Pool
from rl.players import Decision, ModelPlayer, Player, Request, ScriptedPlayer, expert_choice
from runtime.tracing import TIMELINE

IDLE_WAIT_S = 0.002
"""How long to wait for simulators where nothing decodes, before the window gets its turn again (s)."""

EvalTask = tuple[int, Episode]
"""Position in the manifest, and the episode."""


class Job(NamedTuple):
    """An episode to be played, and where its record belongs."""

    group: int
    rollout: int
    episode: Episode


class Lost(NamedTuple):
    """An episode that its simulator could not finish: nothing is known of how it would have ended."""

    job: Job
    reason: str


Watcher = Callable[[Job, EnvResult, tuple[str, ...]], None]
"""Sees every result of an episode, with the actions that led to it (none at the start)."""


@dataclass
class _Live:
    """An episode that is being played."""

    job: Job
    slot: int
    history: deque[Observation]
    turns: list[Turn] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)
    """The newest result's; empty until the reset's arrived."""
    env_steps: int = 0

    @property
    def place(self) -> tuple[int, int]:
        return self.job.group, self.job.rollout

    @property
    def actions(self) -> tuple[str, ...]:
        return self.turns[-1].actions if self.turns else ()


class EpisodeLoop:
    """Plays episodes in the slots of a pool until all have ended.

    With `rollout.deterministic` everything moves in waves: all simulators have stepped, turns are admitted in index
    order, all responses have ended, and again. Then the records depend on the tasks and seeds alone; without it,
    whatever is ready goes on at once.
    """

    def __init__(
        self,
        pool: Pool,
        player: Player,
        config: RunConfig,
        *,
        should_stop: Callable[[], bool] = lambda: False,
        watch: Watcher | None = None,
    ) -> None:
        self.lost: list[Lost] = []
        """Episodes that ended without a record."""
        self._pool = pool
        self._player = player
        self._config = config
        self._should_stop = should_stop
        self._watch = watch
        self._free = list(range(pool.num_envs))
        self._by_slot: dict[int, _Live] = {}
        self._by_place: dict[tuple[int, int], _Live] = {}
        self._stepping: set[int] = set()
        self._start_hashes: dict[int, str] = {}
        self._ended: list[tuple[Job, Rollout]] = []

    def play(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Rollout]]:
        """Yield each record as its episode ends, while others go on; stops early when asked to.

        A lost episode yields nothing and is noted in `lost`.

        Raises:
            UserError: two rollouts of a group started from different states.
        """
        waiting = deque(jobs)
        while not self._should_stop():
            self._admit(waiting)
            if not self._by_place:
                return
            results = self._results()
            if self._should_stop():
                return
            requests = [request for result in results if (request := self._observe(result))]
            if requests:
                self._player.ask(requests)
            for decision in self._decisions():
                self._act(decision)
            TIMELINE.set_busy("environment", bool(self._stepping))
            ended, self._ended = self._ended, []
            yield from sorted(ended, key=lambda record: record[0][:2])

    def _admit(self, waiting: deque[Job]) -> None:
        """Give the next episodes the free slots, lowest first."""
        self._free.sort()
        while waiting and self._free:
            job, slot = waiting.popleft(), self._free.pop(0)
            live = _Live(job, slot, deque(maxlen=self._config.agent.context_clips))
            self._by_slot[slot] = self._by_place[live.place] = live
            self._stepping.add(slot)
            self._pool.reset(slot, job.episode)

    def _results(self) -> list[EnvResult]:
        """What the simulators have: in waves all of it, in index order; else what is there."""
        if not self._stepping:
            return []
        if not self._config.rollout.deterministic:
            return self._pool.poll(0.0 if self._player.is_thinking() else IDLE_WAIT_S)
        results: list[EnvResult] = []
        while len(results) < len(self._stepping) and not self._should_stop():
            results += self._pool.poll(IDLE_WAIT_S)
            decided = self._player.poll()  # for the window's work: nothing is asked
            assert not decided, "a turn was decided that nobody waits for"
        return sorted(results, key=lambda result: self._by_slot[result.slot].place)

    def _decisions(self) -> list[Decision]:
        """What the player decided: in waves all of it, in index order; else what is there."""
        decisions = self._player.poll()
        if self._config.rollout.deterministic:
            while self._player.is_thinking() and not self._should_stop():
                decisions += self._player.poll()
        return sorted(decisions, key=lambda decision: decision.key)

    def _observe(self, result: EnvResult) -> Request | None:
        """Take in one result: the next turn's request, or None where the episode ended."""
        self._stepping.remove(result.slot)
        live = self._by_slot[result.slot]
        if result.lost:
            self.lost.append(Lost(live.job, result.lost))
            self._leave(live)
            return None
        if self._watch:
            self._watch(live.job, result, live.actions)
        if live.turns:
            live.turns[-1] = replace(live.turns[-1], reward=float(result.reward))
        else:
            self._check_start(live.job, result)
        live.info = dict(result.info)
        live.env_steps += result.env_steps
        live.history.append(Observation(clip=result.clip, instruction=result.instruction, actions=live.actions))
        if result.terminated:
            self._end(live, success=bool(result.info.get("success", False)), truncated=False)
            return None
        if result.truncated or len(live.turns) >= self._config.env.max_turns:
            self._end(live, success=False, truncated=True)
            return None
        earlier = (live.turns[-1].prompt, live.turns[-1].response.token_ids) if live.turns else None
        return Request(TurnKey(*live.place, len(live.turns)), tuple(live.history), earlier, tuple(result.expert or ()))

    def _act(self, decision: Decision) -> None:
        """Record one decision and carry it out."""
        live = self._by_place[decision.key.group, decision.key.rollout]
        assert decision.key.turn == len(live.turns), f"{decision.key} was decided, turn {len(live.turns)} was asked"
        live.turns.append(Turn(decision.prompt, decision.response, decision.actions, decision.invalid))
        if decision.invalid and self._config.agent.invalid_action == "terminate":
            self._end(live, success=False, truncated=False)
        else:
            self._stepping.add(live.slot)
            self._pool.step(live.slot, decision.actions)

    def _end(self, live: _Live, *, success: bool, truncated: bool) -> None:
        reward = math.fsum(turn.reward for turn in live.turns)
        info = live.info | {"env_steps": live.env_steps}
        record = Rollout(live.job.episode.id, tuple(live.turns), reward, success, truncated, info)
        self._ended.append((live.job, record))
        self._leave(live)

    def _leave(self, live: _Live) -> None:
        """Give the slot to others."""
        self._player.end(*live.place)
        del self._by_slot[live.slot], self._by_place[live.place]
        self._free.append(live.slot)

    def _check_start(self, job: Job, result: EnvResult) -> None:
        """Rollouts of a group are compared, so they must start from one state."""
        first = self._start_hashes.setdefault(job.group, result.frame_hash)
        if first != result.frame_hash:
            raise UserError(
                f"group {job.group}, episode {job.episode.id!r}: rollout {job.rollout} starts from another state than "
                f"the group's first (frame hashes {result.frame_hash} and {first}). The environment's reset "
                "must depend on the episode's seed alone"
            )


def collect_groups(
    tasks: Sequence[tuple[int, Task]],
    pool: Pool,
    policy: Policy,
    runtime: Decoder,
    config: RunConfig,
    step: int,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    lost: list[Lost] | None = None,
) -> Iterator[Group]:
    """Roll out `rl.group_size` episodes of each task; yield each group once complete, while others are decoded.

    A group with a lost episode is left out whole: rewards are compared among `group_size` rollouts or not at all.

    Args:
        tasks: position in the step's batch, over all ranks, and the task.
        step: with the run's seed it seeds every response where `rollout.deterministic`.
        lost: takes the episodes that were lost.
    """
    size = config.rl.group_size
    jobs = [Job(index, rollout, training_episode(task)) for index, task in tasks for rollout in range(size)]
    player = ModelPlayer(policy, runtime, rollout_sampling(config, step), train=True)
    loop = EpisodeLoop(pool, player, config, should_stop=should_stop)
    finished: dict[int, dict[int, Rollout]] = {index: {} for index, _ in tasks}
    for job, rollout in loop.play(jobs):
        members = finished[job.group]
        members[job.rollout] = rollout
        if len(members) == size:
            yield Group(job.group, tuple(members[place] for place in range(size)))
    if lost is not None:
        lost += loop.lost


def collect_expert(
    tasks: Sequence[tuple[int, Task]],
    pool: Pool,
    policy: Policy,
    config: RunConfig,
    step: int,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    lost: list[Lost] | None = None,
) -> list[Group]:
    """The expert's episodes of some tasks as one group to imitate, lost ones left out; no group where there is none.

    Args:
        pool: built with its expert.
        step: with the run's seed it decides where `imitation.noise` acts.
        lost: takes the episodes that were lost.
    """
    imitation = config.imitation
    choose = expert_choice(
        pool.action_names, noise=imitation.noise, mistakes=imitation.mistakes, seed=stable_seed(config.seed, step)
    )
    loop = EpisodeLoop(pool, ScriptedPlayer(choose, policy), config, should_stop=should_stop)
    jobs = [Job(index, 0, training_episode(task)) for index, task in tasks]
    rollouts = {job.group: rollout for job, rollout in loop.play(jobs)}
    if lost is not None:
        lost += loop.lost
    kept = tuple(rollouts[index] for index in sorted(rollouts) if rollouts[index].turns)
    return [Group(tasks[0][0], kept)] if kept else []


def run_episodes(
    tasks: Sequence[EvalTask],
    pool: Pool,
    player: Player,
    config: RunConfig,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    watch: Watcher | None = None,
    lost: list[Lost] | None = None,
) -> dict[int, Rollout]:
    """Play each episode once; from position in the manifest to its record. `lost` takes those that have none."""
    jobs = [Job(index, 0, episode) for index, episode in tasks]
    loop = EpisodeLoop(pool, player, config, should_stop=should_stop, watch=watch)
    records = {job.group: rollout for job, rollout in loop.play(jobs)}
    if lost is not None:
        lost += loop.lost
    return records


def training_episode(task: Task) -> Episode:
    """The episode of the training split that a task's seed decides."""
    return Episode(id=f"train-{task.seed}", seed=task.seed, split="train")


def rollout_sampling(config: RunConfig, step: int) -> Callable[[TurnKey], Sampling]:
    """How a training response is sampled: seeded by its place in the run where that is asked for."""

    def sampling(key: TurnKey) -> Sampling:
        seed = stable_seed(config.seed, step, *key) if config.rollout.deterministic else None
        return Sampling(config.rollout.max_tokens, config.rollout.temperature, seed)

    return sampling
