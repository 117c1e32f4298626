"""`outrider`, with faults that a file asks for: python faulty_server.py FILE serve MODEL …

The process that computes reads a word from FILE before each step and removes the file. The faults are below
the server's own code: in the model's forward pass, in the file system and in the clock.
"""

from __future__ import annotations

import errno
import os
import runpy
import sys
import threading
import time
from pathlib import Path
from typing import Any

import mlx.core as mx

SLOW_STEP_S = 3.0
CLOCK_JUMP_S = 3600.0
FULL_DISK_S = 5.0

wall_clock = time.time


class HardFault(BaseException):
    """Not an Exception, as a Rust panic is not."""


class Faults:
    def __init__(self, request_file: Path) -> None:
        self._request_file = request_file
        self._clock_ahead_s = 0.0
        self._disk_full_until_s = 0.0

    def install(self) -> None:
        from outrider.models.trunk import Trunk
        from outrider.step.runner import Runner

        launch, logits, fsync = Runner.launch, Trunk.logits, os.fsync
        self.makes_nan = False

        def faulty_launch(runner: Any, *step: Any) -> Any:
            self._strike()
            return launch(runner, *step)

        def faulty_logits(trunk: Any, hidden: mx.array) -> mx.array:
            found = logits(trunk, hidden)
            if self.makes_nan:
                self.makes_nan = False
                return found * mx.nan
            return found

        def faulty_fsync(descriptor: Any) -> None:
            if time.monotonic() < self._disk_full_until_s:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            fsync(descriptor)

        Runner.launch = faulty_launch  # type: ignore[method-assign]
        Trunk.logits = faulty_logits  # type: ignore[method-assign]
        os.fsync = faulty_fsync
        time.time = lambda: wall_clock() + self._clock_ahead_s

    def _strike(self) -> None:
        try:
            fault = self._request_file.read_text()
            self._request_file.unlink()
        except FileNotFoundError:
            return
        match fault:
            case "exception":
                raise RuntimeError("a fault was asked for")
            case "memory":
                raise MemoryError("a fault was asked for")
            case "hard":
                raise HardFault("a fault was asked for")
            case "slow":
                time.sleep(SLOW_STEP_S)
            case "hang":
                threading.Event().wait()
            case "nan":
                self.makes_nan = True
            case "disk":
                self._disk_full_until_s = time.monotonic() + FULL_DISK_S
            case "clock":
                self._clock_ahead_s += CLOCK_JUMP_S
            case "clock back":
                self._clock_ahead_s -= CLOCK_JUMP_S


if __name__ == "__main__":
    import outrider  # noqa: F401  # settings that must come before mlx is used

    Faults(Path(sys.argv[1])).install()
    sys.argv[1:] = sys.argv[2:]
    runpy.run_module("outrider", run_name="__main__", alter_sys=True)
