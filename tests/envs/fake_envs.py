"""An environment that counts, and misbehaves where it is told to; and a class that is none."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from envs.video_env import Split, VideoEnv


class CountingEnv(VideoEnv[np.ndarray]):
    """Frames filled with the number of ticks, three ticks an action; `go` earns 1, and the fifth one ends it.

    `fault` says what happens in the second primitive step, or "reset-raise" and "build-raise" when. With `marks`, a
    folder, it happens `times` times over all processes, and never again. With `helper` it has a process of its own.
    """

    def __init__(self, fault: str = "", length: int = 5, marks: str = "", times: int = 1, helper: bool = False) -> None:
        if fault == "build-raise":
            raise RuntimeError("no display")
        super().__init__(("go", "rest"), (4, 6, 8))
        self._fault, self._length = fault, length
        self._marks, self._times = Path(marks) if marks else None, times
        self._helper = subprocess.Popen(["sleep", "60"]).pid if helper else None

    def _begin(self, split: Split) -> str:
        if self._fault == "reset-raise":
            raise RuntimeError("the scene is missing")
        self._ticks = int(self.np_random.integers(100))
        self._first, self._gone, self._decisions = self._ticks, 0, 0
        self._show()
        return f"count from {self._ticks} in {split}"

    def _show(self) -> None:
        self.frames.push(np.full((6, 8, 3), self._ticks % 256, np.uint8))

    def _advance(self, action: str | None) -> tuple[float, bool, bool]:
        self._decisions += 1
        if self._decisions == 2:
            self._misbehave()
        for _ in range(3):
            self._ticks += 1
            self._show()
        self._gone += action == "go"
        reward = float("nan") if self._fault == "nan" and self._decisions == 2 else float(action == "go")
        return reward, self._gone == self._length, False

    def _misbehave(self) -> None:
        if self._marks is not None and not self._claim(self._marks):
            return
        if self._fault == "raise":
            raise KeyError("left wheel")
        if self._fault == "hang":
            time.sleep(60)
        if self._fault == "hang-in-c":
            ctypes.PyDLL(None).sleep(60)  # with the interpreter's lock held
        if self._fault == "slow":
            time.sleep(0.3)
        if self._fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._fault == "segfault":
            ctypes.string_at(0)
        if self._fault == "exit":
            os._exit(7)

    def _claim(self, marks: Path) -> bool:
        """Take one of the times that are left; two processes never take the same."""
        for number in range(self._times):
            with contextlib.suppress(FileExistsError):
                (marks / str(number)).touch(exist_ok=False)
                return True
        return False

    def _render(self, moments: Any) -> np.ndarray:
        clip = super()._render(moments)
        if self._decisions if hasattr(self, "_decisions") else False:
            clip = {"float": clip / 255.0, "shape": clip[:-1], "list": clip.tolist()}.get(self._fault, clip)
        return clip

    def _info(self) -> dict[str, Any]:
        info: dict[str, Any] = {
            "success": self._gone == self._length,
            "path_length_m": 0.0,
            "geodesic_m": 5.0,
            "distance_m": 0.0,
        }
        if self._fault != "info":
            info["task"] = "count"
        return {**info, "has_torch": "torch" in sys.modules, "pid": os.getpid(), "helper": self._helper}

    def expert_actions(self, max_actions: int) -> tuple[str, ...]:
        return ("go",) * min(max_actions, self._length - self._gone)

    def geodesic_distance(self) -> float:
        return float(self._length - self._gone)


class AnotherWorldEachTime(CountingEnv):
    """Breaks the rule that a seed decides the episode."""

    def _begin(self, split: Split) -> str:
        text = super()._begin(split)
        self._ticks = time.monotonic_ns() % 251
        self._show()
        return text


class AloneEnv(CountingEnv):
    """Allows no second one in its process."""

    one_per_process = True


class NoExpertEnv(CountingEnv):
    """Knows no way."""

    has_expert = False


class ListedEnv(CountingEnv):
    """Has a list of episodes, whose ids repeat from scene to scene."""

    def episodes(self, split: Split) -> list[tuple[str, str]]:
        return [(scene, str(number)) for scene in ("attic", "barn") for number in range(3)]


class RandomFaultsEnv(CountingEnv):
    """Crashes, hangs and dawdles by chance, differently each time; what it shows depends on the seed alone."""

    def __init__(self, crash: float = 0.0, hang: float = 0.0, slow: float = 0.0, raising: float = 0.0) -> None:
        super().__init__()
        self._chances = {
            "segfault": crash / 2,
            "exit": crash / 2,
            "hang": hang,
            "slow-a-little": slow,
            "raise": raising,
        }

    def _advance(self, action: str | None) -> tuple[float, bool, bool]:
        coin = int.from_bytes(os.urandom(7), "big") / (1 << 56)
        for fault, chance in self._chances.items():
            if 0 <= coin < chance:
                self._fault = fault
                self._misbehave()
            coin -= chance
        self._decisions = 10  # past the one in which CountingEnv misbehaves
        return super()._advance(action)

    def _misbehave(self) -> None:
        if self._fault == "slow-a-little":
            time.sleep(0.02)
        super()._misbehave()


class NotAnEnv:
    """Has no steps."""
