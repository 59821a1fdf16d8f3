"""The order of tasks: fixed by the seed, independent of how it is cut."""

from __future__ import annotations

import pytest

from data.task_sampler import TaskSampler, stable_seed


def test_the_order_does_not_depend_on_how_it_is_cut() -> None:
    whole = TaskSampler(3).next(10)
    pieces = TaskSampler(3)
    assert pieces.next(1) + pieces.next(4) + pieces.next(0) + pieces.next(5) == whole
    assert [task.index for task in whole] == list(range(10))


def test_a_resumed_sampler_goes_on_where_the_saved_one_stopped() -> None:
    first = TaskSampler(3)
    first.next(7)
    resumed = TaskSampler(3)
    resumed.load_state(first.state())
    assert resumed.next(5) == first.next(5)


def test_seeds_differ_between_tasks_and_runs() -> None:
    seeds = {task.seed for seed in range(3) for task in TaskSampler(seed).next(500)}
    assert len(seeds) == 1500


def test_another_seeds_cursor_is_refused() -> None:
    with pytest.raises(ValueError, match="seed 3, this run has seed 4"):
        TaskSampler(4).load_state(TaskSampler(3).state())


def test_stable_seed_is_the_first_31_bits_of_a_digest() -> None:
    # printf '1,2,3' | b2sum -l 32
    assert stable_seed(1, 2, 3) == int("e1a2c8b6", 16) >> 1
    assert stable_seed(1, 23) != stable_seed(12, 3)
    assert all(0 <= stable_seed(value) < 2**31 for value in range(100))
