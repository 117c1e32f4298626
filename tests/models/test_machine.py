"""Memory that MLX keeps for the next steps."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest

from outrider.models import machine


@pytest.fixture(autouse=True)
def _roomy_limit() -> Iterator[None]:
    """An engine of another test may have set a lower one."""
    before = mx.set_cache_limit(1 << 30)
    yield
    mx.set_cache_limit(before)


def test_buffers_are_given_back() -> None:
    kept = mx.zeros(1 << 20)
    freed = [mx.zeros((1 << 16) + i) for i in range(16)]
    mx.eval(kept, freed)
    freed.clear()
    assert machine.held_bytes()["buffers"] >= 16 << 18
    machine.release_buffers()
    assert machine.held_bytes()["buffers"] == 0
    assert machine.held_bytes()["arrays"] >= kept.nbytes
    assert kept.sum().item() == 0
