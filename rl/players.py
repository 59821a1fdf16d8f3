"""Who decides the turns of an episode: the policy that is trained, the environment's expert, or chance.

A player is asked for many turns at once and answers when it can; it knows nothing about groups, pools or limits.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from agent.policy import Observation
from data.task_sampler import stable_seed
from data.types import Prompt, Response, Sampling, TurnKey
from rl.interfaces import Decoder, Policy

NO_PROMPT = Prompt(token_ids=(), positions=torch.zeros(3, 0, dtype=torch.long), media=(), key="")
NO_RESPONSE = Response(token_ids=(), behaviour_logprobs=(), finish_reason="stop", policy_version=0)
"""What a turn holds that was played without a model."""


@dataclass(frozen=True, eq=False)
class Request:
    """One turn to be decided."""

    key: TurnKey
    history: tuple[Observation, ...]
    """Observations of the episode so far, the newest last."""
    earlier: tuple[Prompt, tuple[int, ...]] | None
    """The episode's last prompt and the tokens that answered it; None at its first turn."""
    expert: tuple[str, ...]
    """Actions that the environment's expert would carry out now; empty where it has none."""


@dataclass(frozen=True)
class Decision:
    """The answer to a request."""

    key: TurnKey
    prompt: Prompt
    response: Response
    actions: tuple[str, ...]
    """Actions to carry out."""
    invalid: bool = False


Choice = Callable[[Request], tuple[tuple[str, ...], tuple[str, ...]]]
"""From a request to the label, what should be done, and the actions that are carried out."""


@runtime_checkable
class Player(Protocol):
    """Decides turns. `poll` hands out each decision once, in any order."""

    def ask(self, requests: Sequence[Request]) -> None: ...
    def poll(self) -> list[Decision]: ...
    def is_thinking(self) -> bool: ...
    def end(self, group: int, rollout: int) -> None: ...


def _render(policy: Policy, requests: Sequence[Request]) -> list[Prompt]:
    return policy.render([request.history for request in requests], [request.earlier for request in requests])


class ModelPlayer:
    """The policy, decoded by the runtime."""

    def __init__(
        self, policy: Policy, decoder: Decoder, sampling: Callable[[TurnKey], Sampling], *, train: bool
    ) -> None:
        self._policy = policy
        self._decoder = decoder
        self._sampling = sampling
        self._train = train
        self._prompts: dict[TurnKey, Prompt] = {}

    def ask(self, requests: Sequence[Request]) -> None:
        """Render the histories and submit them for decoding."""
        prompts = _render(self._policy, requests)
        for request, prompt in zip(requests, prompts, strict=True):
            self._prompts[request.key] = prompt
            self._decoder.submit(request.key, prompt, self._sampling(request.key), train=self._train)

    def poll(self) -> list[Decision]:
        """Advance the runtime by one decode step, or by window work where nothing decodes."""
        decisions = []
        for key, response in self._decoder.poll():
            parsed = self._policy.parse(response.token_ids)
            actions = tuple(parsed.actions) if parsed.valid else ()
            decisions.append(Decision(key, self._prompts.pop(key), response, actions, invalid=not parsed.valid))
        return decisions

    def is_thinking(self) -> bool:
        """True while responses are decoded."""
        return self._decoder.has_unfinished()

    def end(self, group: int, rollout: int) -> None:
        """The episode is over: its group's rows may be composed."""
        if self._train:
            self._decoder.end_rollout(group, rollout)


class ScriptedPlayer:
    """Answers at once, by rule. With a policy its turns hold prompts and the labels' tokens, ready to be imitated."""

    def __init__(self, choose: Choice, policy: Policy | None):
        """
        Args:
            choose: decides a turn.
            policy: renders prompts and encodes labels; None leaves both out.
        """
        self._choose = choose
        self._policy = policy
        self._decisions: list[Decision] = []

    def ask(self, requests: Sequence[Request]) -> None:
        """Decide all of them now."""
        prompts = [NO_PROMPT] * len(requests)
        if self._policy is not None:
            prompts = _render(self._policy, requests)
        for request, prompt in zip(requests, prompts, strict=True):
            label, carried_out = self._choose(request)
            self._decisions.append(Decision(request.key, prompt, self._response(label), carried_out))

    def poll(self) -> list[Decision]:
        """Everything decided since the last call."""
        decisions, self._decisions = self._decisions, []
        return decisions

    def is_thinking(self) -> bool:
        """True while decisions wait to be fetched."""
        return bool(self._decisions)

    def end(self, group: int, rollout: int) -> None:
        """Nothing is kept for an episode."""

    def _response(self, label: tuple[str, ...]) -> Response:
        if self._policy is None:
            return NO_RESPONSE
        token_ids = tuple(self._policy.encode_actions(label))
        return Response(token_ids, (float("nan"),) * len(token_ids), finish_reason="stop", policy_version=0)


def expert_choice(action_names: Sequence[str], *, noise: float = 0.0, mistakes: float = 0.0, seed: int = 0) -> Choice:
    """The expert's actions as the label, carried out too, but for two shares of turns which take a random action.

    With `noise` the label stays the expert's: the policy learns what to do in places where the expert alone would
    never be. With `mistakes` the random action is the label too: the policy learns from a teacher that errs.
    """
    draw = random_choice(action_names, seed=seed)

    def choose(request: Request) -> tuple[tuple[str, ...], tuple[str, ...]]:
        assert request.expert, f"the environment offered no expert action at {request.key}"
        coin = random.Random(stable_seed(seed, 1, *request.key)).random()
        if coin < mistakes:
            return draw(request)
        return request.expert, draw(request)[1] if coin < mistakes + noise else request.expert

    return choose


def random_choice(action_names: Sequence[str], *, seed: int = 0) -> Choice:
    """One action drawn uniformly, from the seed and the turn's key alone."""

    def choose(request: Request) -> tuple[tuple[str, ...], tuple[str, ...]]:
        action = random.Random(stable_seed(seed, 2, *request.key)).choice(list(action_names))
        return (action,), (action,)

    return choose
