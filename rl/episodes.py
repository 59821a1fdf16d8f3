"""What a run in an environment learns from and is measured by: groups of episodes, the expert's, and held-out ones.

Knows nothing about losses, steps of the optimizer or checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from agent.policy import Observation, VLMPolicy
from configs.schema import RunConfig
from data.task_sampler import Task, TaskSampler, stable_seed
from data.types import Group, Prompt
from envs.pool import EnvPool
from rl.evaluate import eval_sampling, evaluate
from rl.interfaces import Cursors, Policy, Pool, Runtime
from rl.players import ModelPlayer
from rl.rollout import Lost, collect_expert, collect_groups, training_episode
from rl.scores import Evaluation
from runtime.rollplex import Rollplex


class EpisodeSource:
    """Rank r rolls out every `world_size`-th task.

    Args:
        pool: environments for rollouts and evaluation.
        open_experts: opens environments with their expert, for the warm start alone.
        should_stop: asked while episodes are played, which it cuts short.
    """

    def __init__(
        self,
        config: RunConfig,
        pool: Pool,
        policy: Policy,
        runtime: Runtime,
        open_experts: Callable[[], AbstractContextManager[Pool]],
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.config, self.pool, self.policy, self.runtime = config, pool, policy, runtime
        self.lost: list[Lost] = []
        self.max_turns = config.env.max_turns
        self._open_experts = open_experts
        self._experts: Pool | None = None
        self._should_stop = should_stop
        self._expert_tasks = TaskSampler(stable_seed(config.seed, 1))
        self._tasks = TaskSampler(config.seed)

    @contextmanager
    def teacher(self) -> Iterator[None]:
        """The expert's planning costs more than the simulator, so only these environments pay for it."""
        with self._open_experts() as self._experts:
            yield
        self._experts = None

    def demonstrations(self, step: int) -> list[Group]:
        """The expert's episodes of the next tasks, as one group."""
        assert self._experts is not None, "demonstrations are made within teacher()"
        self.lost = []
        tasks = self._share(self._expert_tasks.next(self.config.imitation.episodes_per_step))
        return collect_expert(
            tasks, self._experts, self.policy, self.config, step, should_stop=self._should_stop, lost=self.lost
        )

    def groups(self, step: int) -> Iterator[Group]:
        """Groups of episodes of the next tasks."""
        self.lost = []
        tasks = self._share(self._tasks.next(self.config.rl.groups_per_step))
        return collect_groups(
            tasks, self.pool, self.policy, self.runtime, self.config, step,
            should_stop=self._should_stop, lost=self.lost,
        )  # fmt: skip

    def evaluate(self, folder: Path, videos: int | None = None) -> Evaluation | None:
        """Play the held-out episodes."""
        player = ModelPlayer(self.policy, self.runtime, eval_sampling(self.config), train=False)
        return evaluate(
            self.config, self.pool, player, self.runtime, folder, videos=videos, should_stop=self._should_stop
        )

    def prompts(self, count: int) -> list[tuple[str, Prompt]]:
        """What the model sees at the start of some training episodes, with their ids; no task of the run is used up."""
        found: list[tuple[str, Prompt]] = []
        episodes = [training_episode(task) for task in TaskSampler(self.config.seed).next(count)]
        for start in range(0, count, self.pool.num_envs):
            some = dict(enumerate(episodes[start : start + self.pool.num_envs]))
            for slot, episode in some.items():
                self.pool.reset(slot, episode)
            for result in sorted(self.pool.wait(list(some)), key=lambda result: result.slot):
                if not result.lost:
                    (prompt,) = self.policy.render([[Observation(result.clip, result.instruction)]])
                    found.append((some[result.slot].id, prompt))
        return found

    def metrics(self) -> dict[str, float]:
        """All of a step's numbers are in its groups."""
        return {}

    def cursors(self) -> Cursors:
        """Where the two orders of tasks are."""
        return Cursors(self._expert_tasks.state(), self._tasks.state())

    def load_cursors(self, cursors: Cursors) -> None:
        """Continue from saved cursors."""
        self._expert_tasks.load_state(cursors.imitation)
        self._tasks.load_state(cursors.rl)

    def _share(self, tasks: Sequence[Task]) -> list[tuple[int, Task]]:
        """This rank's tasks, each with its position in the step's batch over all ranks."""
        return list(enumerate(tasks))[self.runtime.rank :: self.runtime.world_size]


@contextmanager
def open_episodes(config: RunConfig, model_dir: Path, should_stop: Callable[[], bool]) -> Iterator[EpisodeSource]:
    """Environments, policy and runtime of a run, closed together."""
    with EnvPool(config.env) as pool:
        policy = VLMPolicy(config.agent, model_dir, pool.action_names)

        def open_experts() -> AbstractContextManager[Pool]:
            return EnvPool(config.env, with_expert=True, max_actions=config.agent.max_actions)

        with Rollplex(config, model_dir, policy.vocabulary) as runtime:
            runtime.start()
            yield EpisodeSource(config, pool, policy, runtime, open_experts, should_stop)
