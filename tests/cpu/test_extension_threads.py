"""The threads of the native extension: one that waits for the core of MLX's thread, which calls it, moves."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from cpu.quantized_products import product, tokens, weights
from outrider.cpu.threads import usable_cpus
from patience import wait_until

TASKS = Path("/proc/self/task")


def threads() -> dict[int, str]:
    """By number: their names. A thread may end meanwhile."""
    found = {}
    for task in TASKS.iterdir():
        with suppress(OSError):
            found[int(task.name)] = (task / "comm").read_text().strip()
    return found


def helpers() -> list[int]:
    return sorted(number for number, name in threads().items() if name == "outrider-helper")


def set_cores(numbers: Iterable[int], cores: set[int]) -> None:
    for number in numbers:
        with suppress(ProcessLookupError):
            os.sched_setaffinity(number, cores)


@pytest.mark.skipif(usable_cpus() < 2, reason="nobody could help")
@pytest.mark.usefixtures("as_before")
def test_a_helper_that_waits_for_the_callers_core_is_sent_away(native: ModuleType) -> None:
    w, x = weights(4096, 576, bits=4, group_size=64), tokens(8, 576)
    native.set_num_threads(1)
    alone = product(native, x, w)
    native.set_num_threads(2)
    wait_until(lambda: np.array_equal(product(native, x, w), alone) and len(helpers()) > 0)
    helper, cores = helpers()[0], os.sched_getaffinity(0)
    core = min(cores)
    set_cores([helper], {core})

    def is_free() -> bool:
        others = threads().keys() - helpers()
        set_cores(others, {core})  # one of them is MLX's
        set_cores(others, cores)
        time.sleep(0.001)  # until the helper is asleep
        assert all(np.array_equal(product(native, x, w), alone) for _ in range(20))
        return os.sched_getaffinity(helper) == cores

    try:
        wait_until(is_free)
    finally:
        set_cores([helper], cores)
