"""Chooses what a run learns from: a set of questions where the config names one, else an environment.

Imports either of them, and vLLM with it, only when it is opened.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from configs.schema import RunConfig
from rl.interfaces import Source


def asks_questions(config: RunConfig) -> bool:
    """Whether a run is about questions on videos, and not about episodes in an environment."""
    return bool(config.data.train or config.data.eval)


def open_source(config: RunConfig, model_dir: Path, should_stop: Callable[[], bool]) -> AbstractContextManager[Source]:
    """The source of a run with its runtime, closed together.

    Raises:
        UserError: the model, the environment or the sets cannot be used.
    """
    if asks_questions(config):
        from rl.questions import open_questions

        return open_questions(config, model_dir, should_stop)
    from rl.episodes import open_episodes

    return open_episodes(config, model_dir, should_stop)
