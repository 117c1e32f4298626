"""Blocks of host arrays for the tests of the disk tier."""

from __future__ import annotations

import numpy as np

from outrider.cache.block_file import Arrays
from outrider.host_array import HostArray


def block(seed: int, num_cells: int = 16) -> Arrays:
    rng = np.random.default_rng(seed)
    return {
        "0": HostArray("F32", rng.standard_normal((2, 3, num_cells, 4)).astype(np.float32)),
        "1": HostArray("BF16", rng.integers(0, 0x7F00, (2, num_cells, 4)).astype(np.uint16)),
        "2": HostArray("F16", rng.standard_normal((1, num_cells)).astype(np.float16)),
    }


def is_same(one: Arrays | None, other: Arrays) -> bool:
    if one is None or list(one) != list(other):
        return False
    return all(
        one[name].dtype == other[name].dtype and np.array_equal(one[name].data, other[name].data)
        for name in other
    )
