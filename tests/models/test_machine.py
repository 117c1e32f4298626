"""Memory that MLX keeps for the next steps."""

from __future__ import annotations

import mlx.core as mx

from outrider.models import machine


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
