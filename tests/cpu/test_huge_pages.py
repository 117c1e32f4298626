"""Weights in huge pages: the same bytes, in fewer pages."""

from __future__ import annotations

import ctypes
import mmap

import mlx.core as mx
import numpy as np
import pytest

from outrider.cpu.extension import extension, loaded

pytestmark = pytest.mark.skipif(extension() is None, reason="no native extension: no compiler, or not Linux")

PAGE = 2 << 20  # bytes
MADV_COLLAPSE = 25


def _has_huge_pages() -> bool:
    """Whether the system moves memory into a huge page when it is asked to."""
    memory = mmap.mmap(-1, 2 * PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(bytes([1]) * len(memory))
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    page = ctypes.c_void_p((start + PAGE - 1) // PAGE * PAGE)
    libc = ctypes.CDLL(None)
    return bool(libc.madvise(page, ctypes.c_size_t(PAGE), MADV_COLLAPSE) == 0)


def _array(num_bytes: int) -> mx.array:
    return mx.array(np.random.default_rng(num_bytes).integers(0, 2**32, num_bytes // 4, dtype=np.uint32))


@pytest.mark.skipif(not _has_huge_pages(), reason="the system has no huge pages")
def test_large_weights_are_moved_and_stay_as_they_are() -> None:
    weights = [_array(6 * PAGE), _array(3 * PAGE)]
    before = [np.array(weight) for weight in weights]
    num_bytes = loaded().use_huge_pages(weights)
    assert PAGE <= num_bytes <= 11 * PAGE  # the first and last pages may be shared with something else
    for weight, old in zip(weights, before, strict=True):
        assert np.array_equal(np.array(weight), old)


def test_small_weights_stay_where_they_are() -> None:
    weights = [_array(64), _array(4096), mx.zeros((0, 8))]
    mx.eval(weights)
    assert loaded().use_huge_pages(weights) == 0
