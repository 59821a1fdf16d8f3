"""The order of training tasks: endless, a function of one seed and a cursor, so that a run resumes where it stopped.

Knows nothing about what a task is: an environment or a data set turns its seed into an episode.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b


@dataclass(frozen=True)
class Task:
    """One draw from the training distribution."""

    index: int
    """Position in the run's order, from 0."""
    seed: int
    """Decides the episode, in [0, 2**31)."""


def stable_seed(*parts: int) -> int:
    """A seed in [0, 2**31) that depends on `parts` alone: the same in every process, on every machine and version.

    Python's `hash` and a generator's state would both do until the next release; a digest always does.
    """
    digest = blake2b(",".join(map(str, parts)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


class TaskSampler:
    """Hands out tasks in an order that `seed` fixes.

    A task's seed depends on its index and the run's seed alone, so the whole state is one integer, and the order is
    the same however the run is cut into steps, ranks and resumes.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._next_index = 0

    def next(self, count: int) -> list[Task]:
        """The next `count` tasks."""
        first = self._next_index
        self._next_index += count
        return [Task(index, stable_seed(self._seed, index)) for index in range(first, self._next_index)]

    def state(self) -> dict[str, int]:
        """The cursor, as plain JSON values."""
        return {"seed": self._seed, "next_index": self._next_index}

    def load_state(self, state: dict[str, int]) -> None:
        """Continue from a saved cursor.

        Raises:
            ValueError: the cursor belongs to another seed, so its order is not this one's.
        """
        if state["seed"] != self._seed:
            raise ValueError(
                f"the saved task order has seed {state['seed']}, this run has seed {self._seed}: "
                f"set seed={state['seed']} or start in a new run_dir"
            )
        self._next_index = state["next_index"]
