"""The threads of the native extension keep off the core of MLX's thread, which calls them."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from cpu.quantized_products import product, tokens, weights
from outrider.cpu.threads import usable_cpus
from patience import wait_until

TASKS = Path("/proc/self/task")


def helpers() -> list[int]:
    return [int(task.name) for task in TASKS.iterdir() if (task / "comm").read_text() == "outrider-helper\n"]


@pytest.mark.skipif(usable_cpus() < 2, reason="nobody could help")
@pytest.mark.usefixtures("as_before")
def test_helpers_may_use_every_core_but_one(native: ModuleType) -> None:
    w, x = weights(4096, 576, bits=4, group_size=64), tokens(8, 576)
    native.set_num_threads(1)
    alone = product(native, x, w)
    native.set_num_threads(3)

    def are_off_one_core() -> bool:
        assert np.array_equal(product(native, x, w), alone)
        cores = [os.sched_getaffinity(helper) for helper in helpers()]
        return len(cores) >= 2 and all(len(each) == len(os.sched_getaffinity(0)) - 1 for each in cores)

    wait_until(are_off_one_core)
