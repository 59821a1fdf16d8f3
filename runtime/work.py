"""Work units: which segments go through the model together.

A unit is the prompts of one group at one turn, packed in rollout order, and the responses to them. Where a turn's
prompt stands alone, each turn is a tree: prompts, then responses. Where it continues the turn before (a chain), the
group is one tree: root, responses, observations, responses, ... Rows depend only on the group's record and on the
config, never on timing, so that every schedule computes the same rows. Decides with plain Python; what a row computes
is `prefix_tree`'s business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from data.types import Group, Prompt, Response
from runtime.prefix_tree import Row, Segment


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
    """One packed row of prompts (or of what a chain has seen since its last response), and the responses to them."""

    turn: int
    prompts: Row
    segment_of: dict[int, Segment]
    """Prompt segment of each rollout."""
    prompt_of: dict[int, Prompt]
    responses: list[ResponseRow] = field(default_factory=list)

    @property
    def scored(self) -> bool:
        """All responses have their reference log-probabilities."""
        return bool(self.responses) and all(item.reference is not None for item in self.responses)

    @property
    def rows(self) -> list[Row]:
        """The unit's rows, ancestors first."""
        return [self.prompts, *(item.row for item in self.responses)]


@dataclass(frozen=True)
class Packing:
    """How segments are arranged in rows."""

    share: bool
    """Equal prompts of a group are one segment."""
    microbatch_tokens: int
    """Most tokens in a row; a longer segment has a row of its own."""
    chain: bool = False
    """A turn's prompt continues the one before it and its response; otherwise every turn is a tree of its own."""


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
        self._rows: list[Row] = []
        """Every row so far, ancestors first."""
        self._leaf_of: dict[int, Segment] = {}
        """Each rollout's newest response, which a chain's next prompt attends to."""

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
        while True:
            turn = len(self.turns)
            if self.num_answered < turn and self._known(self.responses, self.num_answered):
                for unit in self.turns[self.num_answered]:
                    self._compose_responses(unit, _at(self.responses, self.num_answered))
                    answered.append(unit)
                self.num_answered += 1
            elif self._known(self.prompts, turn) and (self.num_answered == turn or not self.packing.chain):
                self.turns.append(self._compose_prompts(turn, _at(self.prompts, turn)))
                prompted += self.turns[-1]
            else:
                return prompted, answered

    def _known(self, record: Sequence[list], turn: int) -> bool:
        """Every rollout has reached this turn or ended before it, and at least one has reached it."""
        reached = [len(items) > turn for items in record]
        over = [ended and len(items) <= turn for ended, items in zip(self.ended, self.prompts, strict=True)]
        return any(reached) and all(r or o for r, o in zip(reached, over, strict=True))

    def _compose_prompts(self, turn: int, prompts: dict[int, Prompt]) -> list[Unit]:
        """Pack one turn's prompts in rollout order; equal ones become one segment where prefixes are shared."""
        units: list[Unit] = []
        segment_of: dict[int, Segment] = {}
        by_key: dict[str, Segment] = {}
        for rollout, prompt in sorted(prompts.items()):
            continues = self.packing.chain and turn > 0
            if continues or not self.packing.share or prompt.key not in by_key:
                segment = self._prompt_segment(rollout, turn, prompt)
                used = sum(len(other.token_ids) for other in set(segment_of.values()))
                if used and used + len(segment.token_ids) > self.packing.microbatch_tokens:
                    units.append(self._unit(turn, segment_of, prompts))
                    segment_of, by_key = {}, {}
                by_key[prompt.key] = segment
            segment_of[rollout] = by_key[prompt.key]
        units.append(self._unit(turn, segment_of, prompts))
        return units

    def _prompt_segment(self, rollout: int, turn: int, prompt: Prompt) -> Segment:
        """A prompt whole, or in a chain what it adds to the turn before."""
        start, parent = 0, None
        if self.packing.chain and turn > 0:
            before = (*self.prompts[rollout][turn - 1].token_ids, *self.responses[rollout][turn - 1].token_ids)
            start, parent = len(before), self._leaf_of[rollout]
            assert prompt.token_ids[:start] == before, f"turn {turn} of rollout {rollout} does not continue its history"
        media = [replace(item, offset=item.offset - start) for item in prompt.media if item.offset >= start]
        key = "" if parent else prompt.key
        return Segment(prompt.token_ids[start:], prompt.positions[:, start:], parent, tuple(media), key=key)

    def _unit(self, turn: int, segment_of: dict[int, Segment], prompts: dict[int, Prompt]) -> Unit:
        segments = tuple(dict.fromkeys(segment_of.values()))
        row = self._row(segments)
        return Unit(turn, row, segment_of, {rollout: prompts[rollout] for rollout in segment_of})

    def _row(self, segments: tuple[Segment, ...]) -> Row:
        """A row, and as its context every earlier row that holds an ancestor."""
        ancestors = {id(ancestor) for segment in segments for ancestor in segment.ancestors()}
        context = [row for row in self._rows if any(id(segment) in ancestors for segment in row.segments)]
        self._rows.append(Row(segments, tuple(context)))
        return self._rows[-1]

    def _compose_responses(self, unit: Unit, responses: dict[int, Response]) -> None:
        """Pack the unit's responses in rollout order, as many a row as fit."""
        chosen: dict[int, Segment] = {}
        used = 0
        for rollout in sorted(unit.segment_of):
            segment = self._response_segment(unit, rollout, responses[rollout])
            if chosen and used + len(segment.token_ids) > self.packing.microbatch_tokens:
                self._response_row(unit, chosen, responses)
                chosen, used = {}, 0
            chosen[rollout] = segment
            used += len(segment.token_ids)
        self._response_row(unit, chosen, responses)

    def _response_row(self, unit: Unit, chosen: dict[int, Segment], responses: dict[int, Response]) -> None:
        row = self._row(tuple(chosen.values()))
        unit.responses.append(ResponseRow(row, list(chosen), unit.turn, [responses[rollout] for rollout in chosen]))
        self._leaf_of |= chosen

    def _response_segment(self, unit: Unit, rollout: int, response: Response) -> Segment:
        # Nothing attends to the last token of a leaf.
        fed = response.token_ids if self.packing.chain else response.token_ids[:-1]
        first = unit.prompt_of[rollout].next_position
        positions = (first + torch.arange(len(fed)))[None].expand(3, -1)
        return Segment(fed, positions, parent=unit.segment_of[rollout], targets=response.token_ids)

    @property
    def units(self) -> list[Unit]:
        """All units so far, turn by turn."""
        return [unit for turn in self.turns for unit in turn]

    def trees(self) -> list[list[Unit]]:
        """Units that must be differentiated together, ancestors first: a turn's each, or a whole chain's."""
        return [self.units] if self.packing.chain else [[unit] for unit in self.units]

    def records(self, group: Group) -> bool:
        """Whether this work was composed from exactly the group's turns."""
        return len(group.rollouts) == len(self.prompts) and all(
            [turn.prompt for turn in rollout.turns] == prompts
            and [turn.response for turn in rollout.turns] == responses
            for rollout, prompts, responses in zip(group.rollouts, self.prompts, self.responses, strict=True)
        )


def _at(record: Sequence[list], turn: int) -> dict:
    return {rollout: items[turn] for rollout, items in enumerate(record) if len(items) > turn}
