from __future__ import annotations

import itertools

import torch

from data.types import Group, Prompt, Response, Rollout, Turn
from runtime.work import GroupWork, Packing


def prompt(key: str, length: int = 4) -> Prompt:
    return Prompt(tuple(range(length)), torch.arange(length)[None].expand(3, -1), (), key)


def response(length: int) -> Response:
    return Response(tuple(range(length)), (0.0,) * length, "stop", 0)


def group(turns: list[list[tuple[str, int]]]) -> Group:
    """`turns[rollout][turn]`: prompt key and response length."""
    prompts: dict[str, Prompt] = {}
    rollouts = []
    for record in turns:
        items = tuple(Turn(prompts.setdefault(key, prompt(key)), response(length)) for key, length in record)
        rollouts.append(Rollout("e", items, 0.0, success=False, truncated=False))
    return Group(0, tuple(rollouts))


def layout(work: GroupWork) -> list[tuple[int, list[int], list[list[int]]]]:
    """Turn, lengths of the prompts, and lengths of what each response row feeds."""
    return [
        (
            unit.turn,
            [len(segment.token_ids) for segment in unit.prompts.segments],
            [[len(segment.token_ids) for segment in item.row.segments] for item in unit.responses],
        )
        for unit in work.units
    ]


PACKING = Packing(share=True, microbatch_tokens=8)
RECORD = [[("a", 6), ("b", 1)], [("a", 5), ("c", 2), ("d", 4)], [("a", 1)]]


def test_equal_prompts_are_one_segment_and_rows_keep_to_the_limit() -> None:
    work = GroupWork.of(group(RECORD), PACKING)
    # A response's last token is not fed; 5 and 4 are too many for a row of 8, 4 and 0 are not.
    assert layout(work) == [(0, [4], [[5], [4, 0]]), (1, [4, 4], [[0, 1]]), (2, [4], [[3]])]


def test_unshared_repeats_the_prompt_for_every_response() -> None:
    work = GroupWork.of(group(RECORD), Packing(share=False, microbatch_tokens=8))
    assert layout(work)[:2] == [(0, [4, 4], [[5], [4]]), (0, [4], [[0]])]


def test_a_prompt_longer_than_the_limit_has_a_row_of_its_own() -> None:
    work = GroupWork(3, PACKING)
    work.prompts = [[prompt("a", 3)], [prompt("b", 20)], [prompt("c", 3)]]
    units, _ = work.compose()
    assert [[len(s.token_ids) for s in unit.prompts.segments] for unit in units] == [[3], [20], [3]]


def test_rows_do_not_depend_on_the_order_in_which_things_become_known() -> None:
    record = group(RECORD)
    expected = layout(GroupWork.of(record, PACKING))
    events = [
        (kind, rollout, turn)
        for rollout, item in enumerate(record.rollouts)
        for turn in range(len(item.turns))
        for kind in ("prompt", "response")
    ] + [("end", rollout, 99) for rollout in range(3)]
    for order in itertools.islice(itertools.permutations(range(3)), 6):
        # Rollouts in any relative order, each one's own events in their order.
        work = GroupWork(3, PACKING)
        prompted, answered = [], []
        for rollout in order:
            for kind, _, turn in [event for event in events if event[1] == rollout]:
                if kind == "prompt":
                    work.prompts[rollout].append(record.rollouts[rollout].turns[turn].prompt)
                elif kind == "response":
                    work.responses[rollout].append(record.rollouts[rollout].turns[turn].response)
                else:
                    work.ended[rollout] = True
                new = work.compose()
                prompted += new[0]
                answered += new[1]
        assert layout(work) == expected
        assert prompted == work.units
        assert answered == work.units
        assert work.records(record)


def test_a_row_waits_until_every_rollout_has_reached_its_turn_or_ended() -> None:
    work = GroupWork(2, PACKING)
    work.prompts[0].append(prompt("a"))
    assert work.compose() == ([], [])
    work.ended[1] = True
    prompted, answered = work.compose()
    assert (len(prompted), answered) == (1, [])


def test_a_record_with_other_turns_is_not_taken_for_this_work() -> None:
    work = GroupWork.of(group(RECORD), PACKING)
    assert not work.records(group(RECORD))  # equal, but rendered anew
