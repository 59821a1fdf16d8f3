"""Errors that whoever runs Rollplex can cause and mend. Knows nothing about what raises them.

`run.py` prints these as one readable message and exits with 2; any other exception is ours, and keeps its traceback.
"""

from __future__ import annotations


class UserError(Exception):
    """Something the user gave is wrong. The message says where, what, the value, and what to do."""


class ConfigError(UserError, ValueError):
    """A config file or an override is wrong."""


class RunInterrupted(Exception):
    """A signal asked the run to end, and it has saved what it could. `run.py` exits with 128 + `signum`."""

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.signum = signum
