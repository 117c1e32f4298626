"""The threads of the native extension: one that waits for the core of MLX's thread, which calls it, moves."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from cpu.quantized_products import product, tokens, weights
from outrider.cpu.threads import usable_cpus
from patience import wait_until

TASKS = Path("/proc/self/task")


def helpers() -> set[int]:
    return {int(task.name) for task in TASKS.iterdir() if (task / "comm").read_text() == "outrider-helper\n"}


def set_cores(threads: set[int], cores: set[int]) -> None:
    for thread in threads:
        os.sched_setaffinity(thread, cores)


@pytest.mark.skipif(usable_cpus() < 2, reason="nobody could help")
@pytest.mark.usefixtures("as_before")
def test_a_helper_that_waits_for_the_callers_core_is_sent_away(native: ModuleType) -> None:
    w, x = weights(4096, 576, bits=4, group_size=64), tokens(8, 576)
    native.set_num_threads(1)
    alone = product(native, x, w)
    native.set_num_threads(2)
    wait_until(lambda: np.array_equal(product(native, x, w), alone) and len(helpers()) > 0)
    (helper, *_), cores = sorted(helpers()), os.sched_getaffinity(0)
    core = min(cores)
    os.sched_setaffinity(helper, {core})

    def is_free() -> bool:
        others = {int(task.name) for task in TASKS.iterdir()} - helpers()
        set_cores(others, {core})  # one of them is MLX's
        set_cores(others, cores)
        time.sleep(0.001)  # until the helper is asleep
        assert all(np.array_equal(product(native, x, w), alone) for _ in range(20))
        return os.sched_getaffinity(helper) == cores

    wait_until(is_free)
