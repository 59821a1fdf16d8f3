"""A decode worker that hangs or dies on files of certain names; with `first` in the name only before PyAV is forced."""

from __future__ import annotations

import os
import time

from data.child_process import Handler
from data.decode_worker import DecodeSetup, DecodeTask
from data.decode_worker import make_handler as make_real_handler


def make_handler(setup: DecodeSetup) -> Handler:
    real = make_real_handler(setup)

    def handle(task: DecodeTask | None) -> object:
        name = task.path.stem if task else ""
        if task and ("first" not in name or task.decoder == "auto"):
            if "hang" in name:
                time.sleep(1000)
            if "crash" in name:
                os.abort()
        return real(task)

    return handle
