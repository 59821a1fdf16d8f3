"""Work units: which segments go through the model together.

A unit is the prompts of one group at one turn, packed in rollout order, and the responses to them. Its rows depend
only on the group's record and on the config, never on timing, so that every schedule computes the same rows. Decides
with plain Python; what a row computes is `prefix_tree`'s business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from data.types import Group, Prompt, Response
from runtime.prefix_tree import Encoding, Row, Segment


@dataclass(eq=False)
class ResponseRow:
    """Some of a unit's responses as one row, with what a loss needs to know of each token."""

    row: Row
    rollouts: list[int]
    """Rollout of each response."""
    turn: int
    responses: list[Response]
    reference: torch.Tensor | None = None
    """Reference log-probability of each token, once scored."""
    old: torch.Tensor | None = None
    """Trainer's log-probability of each token at the rollout's version, once it trained on it."""


@dataclass(eq=False)
class Unit:
    """One packed row of prompts, and the rows of responses to them."""

    turn: int
    prompts: Row
    segment_of: dict[int, Segment]
    """Prompt segment of each rollout."""
    prompt_of: dict[int, Prompt]
    responses: list[ResponseRow] = field(default_factory=list)
    actor_prefix: Encoding | None = None
    reference_prefix: Encoding | None = None

    @property
    def scored(self) -> bool:
        """All responses have their reference log-probabilities."""
        return bool(self.responses) and all(row.reference is not None for row in self.responses)


@dataclass(frozen=True)
class Packing:
    """Limits on rows."""

    share: bool
    microbatch_tokens: int
    max_response_tokens: int

    @property
    def responses_per_row(self) -> int:
        """Responses that fit a row whatever their length: rows must not depend on what was sampled."""
        return max(1, self.microbatch_tokens // self.max_response_tokens)


def compose_prompts(turn: int, prompts: dict[int, Prompt], packing: Packing) -> list[Unit]:
    """Pack one turn's prompts, by rollout; equal prompts become one segment where prefixes are shared."""
    units: list[Unit] = []
    segments: list[Segment] = []
    segment_of: dict[int, Segment] = {}
    by_key: dict[str, Segment] = {}

    def close() -> None:
        if segments:
            chosen = {rollout: prompts[rollout] for rollout in segment_of}
            units.append(Unit(turn, Row(tuple(segments)), dict(segment_of), chosen))
        segments.clear()
        segment_of.clear()
        by_key.clear()

    for rollout, prompt in sorted(prompts.items()):
        if not packing.share or prompt.key not in by_key:
            used = sum(len(segment.token_ids) for segment in segments)
            if used and used + len(prompt.token_ids) > packing.microbatch_tokens:
                close()
            segment = Segment(prompt.token_ids, prompt.positions, media=prompt.media)
            segments.append(segment)
            by_key[prompt.key] = segment
        segment_of[rollout] = by_key[prompt.key]
    close()
    return units


def compose_responses(unit: Unit, responses: dict[int, Response], packing: Packing) -> None:
    """Pack the unit's responses, in rollout order."""
    rollouts = sorted(unit.segment_of)
    for start in range(0, len(rollouts), packing.responses_per_row):
        chosen = rollouts[start : start + packing.responses_per_row]
        segments = tuple(_response_segment(unit, rollout, responses[rollout]) for rollout in chosen)
        answers = [responses[rollout] for rollout in chosen]
        unit.responses.append(ResponseRow(Row(segments, (unit.prompts,)), chosen, unit.turn, answers))


def _response_segment(unit: Unit, rollout: int, response: Response) -> Segment:
    fed = response.token_ids[:-1]  # nothing attends to a leaf's last token
    first = unit.prompt_of[rollout].next_position
    positions = (first + torch.arange(len(fed)))[None].expand(3, -1)
    return Segment(fed, positions, parent=unit.segment_of[rollout], targets=response.token_ids)


class GroupWork:
    """One group's units, composed turn by turn as its prompts and responses become known."""

    def __init__(self, size: int, packing: Packing) -> None:
        self.packing = packing
        self.prompts: list[list[Prompt]] = [[] for _ in range(size)]
        self.responses: list[list[Response]] = [[] for _ in range(size)]
        self.ended = [False] * size
        self.turns: list[list[Unit]] = []
        """Units of each turn whose prompts are all known."""
        self.num_answered = 0
        """Turns whose responses are all known (count)."""

    @classmethod
    def of(cls, group: Group, packing: Packing) -> GroupWork:
        """The work of a finished group, from its record."""
        work = cls(len(group.rollouts), packing)
        for index, rollout in enumerate(group.rollouts):
            work.prompts[index] = [turn.prompt for turn in rollout.turns]
            work.responses[index] = [turn.response for turn in rollout.turns]
            work.ended[index] = True
        work.compose()
        return work

    def compose(self) -> tuple[list[Unit], list[Unit]]:
        """Compose what has become known; returns the units whose prompts, and those whose responses, are new."""
        prompted: list[Unit] = []
        answered: list[Unit] = []
        while self._known(self.prompts, turn := len(self.turns)):
            units = compose_prompts(turn, _at(self.prompts, turn), self.packing)
            self.turns.append(units)
            prompted += units
        while self.num_answered < len(self.turns) and self._known(self.responses, self.num_answered):
            for unit in self.turns[self.num_answered]:
                compose_responses(unit, _at(self.responses, self.num_answered), self.packing)
                answered.append(unit)
            self.num_answered += 1
        return prompted, answered

    def _known(self, record: Sequence[list], turn: int) -> bool:
        """Every rollout has reached this turn or ended before it, and at least one has reached it."""
        reached = [len(items) > turn for items in record]
        return any(reached) and all(r or ended for r, ended in zip(reached, self.ended, strict=True))

    @property
    def units(self) -> list[Unit]:
        return [unit for turn in self.turns for unit in turn]

    def records(self, group: Group) -> bool:
        """Whether this work was composed from exactly the group's turns."""
        return len(group.rollouts) == len(self.prompts) and all(
            [turn.prompt for turn in rollout.turns] == prompts
            and [turn.response for turn in rollout.turns] == responses
            for rollout, prompts, responses in zip(group.rollouts, self.prompts, self.responses, strict=True)
        )


def _at(record: Sequence[list], turn: int) -> dict:
    return {rollout: items[turn] for rollout, items in enumerate(record) if len(items) > turn}
