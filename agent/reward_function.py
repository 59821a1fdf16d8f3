"""A user's reward function in a process of its own: it may crash, hang or return anything.

The function is called as `function(responses=[...], row={...})`, with the row's `id`, `question`, `options`, `answer`,
`kind`, `videos` and `tags`, and returns one number for each response, or None where it has none. Knows nothing about
weights or policies.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from numbers import Real
from typing import Any

from data.child_process import Child, ChildDied
from data.video_qa import VideoQARow

START_TIMEOUT_S = 120.0
"""Importing the user's module may take this long (s)."""


class RewardFunctionError(Exception):
    """A call failed; the message names the function.

    Args:
        is_wrong_type: it returned something that no policy can make a reward of.
    """

    def __init__(self, message: str, *, is_wrong_type: bool = False) -> None:
        super().__init__(message)
        self.is_wrong_type = is_wrong_type


class RewardFunction:
    """One user function.

    Args:
        place: `module:function`, importable from where the run was started.
        timeout_s: time for one call (s).

    Raises:
        RewardFunctionError: it cannot be imported.
    """

    def __init__(self, place: str, timeout_s: float) -> None:
        self.place, self._timeout_s = place, timeout_s
        self._child = self._start()

    def __call__(self, responses: Sequence[str], row: VideoQARow) -> list[float | None]:
        """The function's value for each response; None and NaN are passed on.

        Raises:
            RewardFunctionError: it raised, hung, died, or returned another number of values or values of another type.
        """
        try:
            self._child.ask((list(responses), row_fields(row)))
            worked, values = self._child.answer(self._timeout_s)
        except TimeoutError:
            self._restart()
            raise RewardFunctionError(f"{self.place} took longer than {self._timeout_s:g} s") from None
        except ChildDied as error:
            self._restart()
            raise RewardFunctionError(f"{self.place} crashed: {error}") from None
        if not worked:
            raise RewardFunctionError(f"{self.place} raised:\n{values}".rstrip())
        if isinstance(values, str):
            raise RewardFunctionError(f"{self.place} {values}", is_wrong_type=True)
        if len(values) != len(responses):
            raise RewardFunctionError(f"{self.place} returned {len(values)} rewards for {len(responses)} responses")
        return list(values)

    def close(self) -> None:
        """End its process."""
        self._child.kill()

    def _start(self) -> Child:
        child = Child("agent.reward_function:make_handler", self.place)
        try:
            child.ask(None)
            worked, answer = child.answer(START_TIMEOUT_S)
        except (TimeoutError, ChildDied) as error:
            child.kill()
            raise RewardFunctionError(f"{self.place} could not be imported: {error or 'it takes too long'}") from error
        if not worked:
            child.kill()
            raise RewardFunctionError(f"{self.place} cannot be imported: {str(answer).rstrip().splitlines()[-1]}")
        return child

    def _restart(self) -> None:
        self._child.kill()
        self._child = self._start()


def row_fields(row: VideoQARow) -> dict[str, Any]:
    """What a user's function is told of a row, as plain values."""
    return {
        "id": row.id,
        "question": row.question,
        "options": list(row.options),
        "answer": row.answer,
        "kind": row.kind,
        "videos": [str(video) for video in row.videos],
        "tags": dict(row.tags),
    }


def make_handler(place: str) -> Callable[[Any], list[float | None] | str | None]:
    """Import the function; the handler calls it and makes plain numbers of what it returns, or says what it is."""
    module, _, name = place.partition(":")
    sys.path.append(os.getcwd())  # only now: a folder `data` there would hide ours
    function = getattr(importlib.import_module(module), name)

    def handle(request: tuple[list[str], dict[str, Any]] | None) -> list[float | None] | str | None:
        if request is None:
            return None
        responses, row = request
        values = function(responses=responses, row=row)
        return [None] * len(responses) if values is None else plain_values(values)

    return handle


def plain_values(values: Any) -> list[float | None] | str:
    """Floats and None from whatever holds numbers (lists, arrays, tensors); a text that says what else it was."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    if isinstance(values, Real):
        values = [values]
    if isinstance(values, str | bytes | Mapping | Set) or not hasattr(values, "__iter__"):
        return f"returned {type(values).__name__}, expected one number for each response"
    plain: list[float | None] = []
    for value in values:
        number = _single(value)
        if number is not None and not isinstance(number, Real):
            return f"returned {number!r} ({type(number).__name__}) among its rewards, expected numbers"
        plain.append(None if number is None else float(number))
    return plain


def _single(value: Any) -> Any:
    """What a numpy scalar, or a tensor, list or tuple of one element holds; anything else as it is."""
    try:
        value = value.item() if hasattr(value, "item") else value
    except (TypeError, ValueError, RuntimeError):  # an array of several
        return value
    return _single(value[0]) if isinstance(value, list | tuple) and len(value) == 1 else value
