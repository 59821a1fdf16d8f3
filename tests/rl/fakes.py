"""A world, a policy and a runtime that decide in plain Python, in whatever order a seed says.

The world: an episode is won by its `length(episode)`-th "go". A response is one token: 0 says "go", 1 "stay", and
anything else is no action.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from agent.action_parser import ParsedAction
from agent.policy import Observation
from configs.schema import AgentConfig, EnvConfig, EvalConfig, ImitationConfig, RLConfig, RolloutConfig, RunConfig
from data.types import Group, GroupLoss, Prompt, Response, Sampling, TokenBatch, TurnKey
from envs.pool import EnvResult
from envs.registration import Episode

ACTIONS = ("go", "stay")
GO, STAY, NONSENSE = 0, 1, 9


def fake_config(folder: Path | str = "unused", **changes: object) -> RunConfig:
    """A small run; `section={...}` or `field=value` change it."""
    sections: dict[str, tuple[type, dict[str, object]]] = {
        "env": (EnvConfig, {"max_turns": 6}),
        "agent": (AgentConfig, {}),
        "rollout": (RolloutConfig, {}),
        "rl": (RLConfig, {"group_size": 4, "groups_per_step": 3}),
        "imitation": (ImitationConfig, {"episodes_per_step": 3}),
        "eval": (EvalConfig, {"episodes": 5, "videos": 0}),
    }
    built = {name: cls(**(defaults | changes.pop(name, {}))) for name, (cls, defaults) in sections.items()}  # type: ignore[operator]
    return RunConfig(run_dir=str(folder), **built, **changes)  # type: ignore[arg-type]


class FakePool:
    """Simulators that answer late and out of order."""

    action_names = ACTIONS
    heldout: tuple[tuple[str, str], ...] = ()

    def __init__(self, num_envs: int, length: Callable[[Episode], int], *, timing: int = 0) -> None:
        self.num_envs = num_envs
        self.events: list[tuple[str, int]] = []
        self.slow_slots: dict[int, int] = {}
        """Slot -> polls for which it stays silent."""
        self.start_hash: Callable[[int, Episode], str] = lambda slot, episode: f"start-{episode.seed}"
        self.geodesic_m = 2.0
        self.loses: Callable[[int, Episode, int], bool] = lambda slot, episode, went: False
        """Whether the simulator gives an episode up, by slot, episode and "go"s so far."""
        self._length = length
        self._random = random.Random(timing)
        self._pending: dict[int, EnvResult] = {}
        self._state: dict[int, tuple[Episode, int, int]] = {}

    def reset(self, slot: int, episode: Episode) -> None:
        assert slot not in self._pending
        self.events.append(("reset", slot))
        self._state[slot] = (episode, 0, 0)
        self._pending[slot] = self._result(slot, 0.0, self.start_hash(slot, episode), env_steps=0)

    def step(self, slot: int, actions: Sequence[str]) -> None:
        assert slot not in self._pending
        self.events.append(("step", slot))
        episode, went, walked = self._state[slot]
        assert went < self._length(episode), "the episode is over"
        went += actions.count("go")
        self._state[slot] = (episode, went, walked + len(actions))
        reward = 1.0 if went >= self._length(episode) else -0.125
        self._pending[slot] = self._result(slot, reward, "later", env_steps=max(len(actions), 1))

    def poll(self, timeout_s: float) -> list[EnvResult]:
        ready = [slot for slot in self._pending if self._random.random() < 0.5 and not self._is_slow(slot)]
        self._random.shuffle(ready)
        return [self._pending.pop(slot) for slot in ready]

    def wait(self, slots: Sequence[int]) -> list[EnvResult]:
        mixed = self._random.sample(list(slots), len(slots))
        return [self._pending.pop(slot) for slot in mixed]

    def check_integrity(self) -> None:
        """Nobody is still awaited."""
        assert not self._pending

    def _is_slow(self, slot: int) -> bool:
        self.slow_slots[slot] = self.slow_slots.get(slot, 0) - 1
        return self.slow_slots[slot] >= 0

    def _result(self, slot: int, reward: float, frame_hash: str, env_steps: int) -> EnvResult:
        episode, went, walked = self._state[slot]
        won = went >= self._length(episode)
        if self.loses(slot, episode, went):
            empty = np.zeros((2, 28, 28, 3), np.uint8)
            return EnvResult(slot, empty, "", float("nan"), False, False, {}, (), 0, "", lost="the wheel came off")
        clip = np.full((2, 28, 28, 3), min(went, 255), np.uint8)
        info = {"success": won, "path_length_m": float(walked), "geodesic_m": self.geodesic_m}
        return EnvResult(
            slot=slot,
            clip=clip,
            instruction=f"go {self._length(episode)} times",
            reward=reward,
            terminated=won,
            truncated=False,
            info=info,
            env_steps=env_steps,
            frame_hash=frame_hash,
            expert=("go",),
        )


class FakePolicy:
    """A prompt is the number of its last frame's brightness; the histories it saw are kept."""

    def __init__(self) -> None:
        self.histories: list[Sequence[Observation]] = []

    def render(
        self,
        histories: Sequence[Sequence[Observation]],
        earlier: Sequence[tuple[Prompt, Sequence[int]] | None] | None = None,
    ) -> list[Prompt]:
        self.histories += histories
        return [_prompt(int(history[-1].clip[-1, 0, 0, 0])) for history in histories]

    def parse(self, token_ids: Sequence[int]) -> ParsedAction:
        valid = token_ids[0] < len(ACTIONS)
        return ParsedAction((ACTIONS[token_ids[0]],) if valid else (), valid, str(token_ids[0]))

    def encode_actions(self, actions: Sequence[str]) -> tuple[int, ...]:
        return tuple(ACTIONS.index(action) for action in actions)


class FakeRuntime:
    """Decodes each response for some polls, ends them in any order; its weights are one number that updates change."""

    rank = 0
    world_size = 1
    weights_shared_fraction = 1.0
    train_order = (0, 1)

    def __init__(
        self, answer: Callable[[TurnKey, Sampling], int] = lambda key, sampling: GO, *, timing: int = 0
    ) -> None:
        self.answer = answer
        self.submitted: list[tuple[TurnKey, Sampling, bool]] = []
        self.ended_rollouts: list[tuple[int, int]] = []
        self.trained: list[tuple[Group, GroupLoss]] = []
        self.learning_rates: list[float] = []
        self.weights = 1
        self.reference: int | None = None
        self.num_polls = 0
        self.on_poll: Callable[[], None] = lambda: None
        self._pending: list[tuple[Group, GroupLoss]] = []
        self._random = random.Random(timing)
        self._decoding: dict[TurnKey, tuple[int, Sampling]] = {}

    def submit(self, key: TurnKey, prompt: Prompt, sampling: Sampling, *, train: bool = True) -> None:
        assert key not in self._decoding
        self.submitted.append((key, sampling, train))
        self._decoding[key] = (self._random.randrange(1, 6), sampling)

    def poll(self) -> list[tuple[TurnKey, Response]]:
        self.num_polls += 1
        self.on_poll()
        self._decoding = {key: (left - 1, sampling) for key, (left, sampling) in self._decoding.items()}
        done = [key for key, (left, _) in self._decoding.items() if left == 0]
        self._random.shuffle(done)
        return [(key, self._respond(key, self._decoding.pop(key)[1])) for key in done]

    def has_unfinished(self) -> bool:
        return bool(self._decoding)

    def end_rollout(self, group: int, rollout: int) -> None:
        self.ended_rollouts.append((group, rollout))

    def train_on(self, group: Group, loss: GroupLoss) -> None:
        self._pending.append((group, loss))
        self.trained.append((group, loss))

    def update(self, lr: float) -> None:
        """Fold everything that was learned from into the weights."""
        self.learning_rates.append(lr)
        for group, loss in self._pending:
            total, _ = loss.fn(_batch(group))
            for value in (*group.rewards.tolist(), total.item(), lr):
                self.weights = (self.weights * 31 + hash(value)) % (1 << 31)
        self._pending = []

    def forget_times(self) -> None:
        pass

    def stats(self) -> dict[str, float]:
        learned = {
            "train/loss": self.weights / (1 << 31),
            "train/grad_norm": 1.0,
            "train/kl_sum": 6.0,
            "train/tokens": 4.0,
        }
        return learned | {"tokens/trained": 10.0, "tokens/naive": 50.0, "window/hidden_s": 3.0, "window/spill_s": 1.0}

    def start_rl(self) -> None:
        self.reference = self.weights

    def all_reduce(self, values: dict[str, float]) -> dict[str, float]:
        return dict(values)

    def save(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "weights.json").write_text(json.dumps([self.weights, self.reference]))

    def load(self, folder: Path, *, weights_only: bool = False) -> None:
        self.weights, self.reference = json.loads((folder / "weights.json").read_text())

    def check_integrity(self) -> None:
        """Nothing decodes, and nothing waits to be trained on."""
        assert not self._decoding
        assert not self._pending

    def _respond(self, key: TurnKey, sampling: Sampling) -> Response:
        return Response((self.answer(key, sampling),), (-0.5,), "stop", policy_version=0)


def _prompt(number: int) -> Prompt:
    return Prompt((number,), torch.zeros(3, 1, dtype=torch.long), (), key=str(number))


def _batch(group: Group) -> TokenBatch:
    """Every token has probability 1/2."""
    places = [
        (row, column)
        for row, rollout in enumerate(group.rollouts)
        for column, turn in enumerate(rollout.turns)
        for _ in turn.response.token_ids
    ]
    logprobs = torch.full((len(places),), -0.69314718, dtype=torch.float64)
    owners = torch.tensor(places).reshape(-1, 2)
    return TokenBatch(logprobs, logprobs, logprobs, logprobs, owners[:, 0], owners[:, 1])
