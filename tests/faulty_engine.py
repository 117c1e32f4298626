"""Faults of the engine, for real server processes: a request's seed says what the next turn does."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from outrider.engine.loop import EngineLoop

HOLD_SEED = 1001  # the engine stands still while the file exists that the variable HOLD_FILE names
PANIC_SEED = 1002  # as if a Rust library panicked
PROGRAM = (
    "-c",
    f"import runpy, sys; sys.path.append({str(Path(__file__).parent)!r}); import outrider, faulty_engine; "
    "faulty_engine.install(); runpy.run_module('outrider', run_name='__main__')",
)


class Panic(BaseException):
    """Like pyo3's PanicException, which is no Exception either."""


def install() -> None:
    turn = EngineLoop.turn

    def faulty_turn(loop: Any) -> None:
        seeds = {sequence.request.params.seed for sequence, _ in loop.live.values()}
        while HOLD_SEED in seeds and os.path.exists(os.environ["HOLD_FILE"]):
            time.sleep(0.005)
        if PANIC_SEED in seeds:
            raise Panic("as asked")
        turn(loop)

    EngineLoop.turn = faulty_turn  # type: ignore[method-assign]
