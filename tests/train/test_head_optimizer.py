from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from outrider.train.optimizer import MUON_RMS, new_optimizer, orthogonal, rate_factor, set_rate


@pytest.mark.parametrize("shape", [(8, 8), (24, 6), (6, 24), (3, 8, 16)])
def test_newton_schulz_brings_singular_values_near_one(shape: tuple[int, ...]) -> None:
    matrix = 1e-6 * mx.random.normal(shape, key=mx.random.key(1))
    values = np.linalg.svd(np.array(orthogonal(matrix, 5)), compute_uv=False)
    assert values.min() > 0.3
    assert values.max() < 1.4


@pytest.mark.parametrize("shape", [(16, 16), (64, 8), (8, 64), (4, 16, 8)])
def test_updates_have_the_same_size_for_every_shape(shape: tuple[int, ...]) -> None:
    parameters = {"weight": mx.zeros(shape)}
    optimizer = new_optimizer()
    set_rate(optimizer, 0.01)
    gradients = {"weight": mx.random.normal(shape, key=mx.random.key(1))}
    update = optimizer.apply_gradients(gradients, parameters)["weight"]
    assert float(mx.sqrt((update * update).mean())) == pytest.approx(0.01 * MUON_RMS, rel=0.35)


def test_a_state_that_was_flattened_goes_on_alike() -> None:
    """As a checkpoint does it."""
    gradients = {"layers": [{"w": mx.random.normal((4, 4)), "b": mx.random.normal((4,))}]}
    parameters = {"layers": [{"w": mx.ones((4, 4)), "b": mx.ones((4,))}]}
    first, second = new_optimizer(), new_optimizer()
    set_rate(first, 0.01)
    parameters = first.apply_gradients(gradients, parameters)
    second.state = tree_unflatten(tree_flatten(first.state))
    for optimizer in (first, second):
        set_rate(optimizer, 0.01)
    after = [dict(tree_flatten(one.apply_gradients(gradients, parameters))) for one in (first, second)]
    for name in after[0]:
        np.testing.assert_array_equal(np.array(after[0][name]), np.array(after[1][name]))


def test_the_rate_warms_up_and_falls_to_nearly_nothing() -> None:
    factors = [rate_factor(step, step / 1000, 1000) for step in range(1000)]
    assert factors[0] < 0.05
    assert max(factors) > 0.98
    assert factors.index(max(factors)) in range(55, 65)
    assert factors[-1] == pytest.approx(0.02, abs=0.001)
    assert rate_factor(0, 0, 5) == 1  # a handful of steps does not spend itself on warming up
