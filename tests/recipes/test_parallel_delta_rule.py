"""The delta rule of the hybrids' recipe, over whole rows, against mlx-lm's, token by token."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.gated_delta import gated_delta_update, normalize_qk

FILE = Path(__file__).parents[2] / "recipes" / "tiny_hybrid" / "delta_rule.py"
ROWS, KEY_HEADS, VALUE_HEADS, DIM = 2, 2, 4, 16


@pytest.fixture(scope="module")
def delta_rule() -> ModuleType:
    spec = importlib.util.spec_from_file_location("delta_rule", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def layer_inputs(width: int, likeness: float) -> list[mx.array]:
    """q, k, v, a, b, A_log, dt_bias of a layer. The higher `likeness`, the more alike the keys of a row."""
    mx.random.seed(width)
    keys = mx.random.normal((ROWS, width, KEY_HEADS, DIM)) + likeness
    q, k = normalize_qk(mx.random.normal(keys.shape), keys, inv_scale=DIM**-0.5, eps=1e-6)
    v = mx.random.normal((ROWS, width, VALUE_HEADS, DIM))
    a, b = mx.random.normal((2, ROWS, width, VALUE_HEADS))
    return [q, k, v, a, b, mx.log(mx.linspace(0.02, 1.0, VALUE_HEADS)), mx.zeros(VALUE_HEADS)]


def token_by_token(*inputs: mx.array) -> tuple[mx.array, Any]:
    return gated_delta_update(*inputs, use_kernel=False)


@pytest.mark.parametrize("width", [1, 2, 8, 64])
@pytest.mark.parametrize("likeness", [0.0, 5.0])
def test_outputs_and_gradients_are_those_of_the_sequential_rule(
    width: int, likeness: float, delta_rule: ModuleType
) -> None:
    inputs = layer_inputs(width, likeness)
    rules = (token_by_token, delta_rule.parallel_update)
    want, found = (rule(*inputs)[0] for rule in rules)
    assert mx.abs(want - found).max() < 1e-5

    places = list(range(len(inputs)))
    want_gradients, gradients = (
        mx.grad(lambda *each, rule=rule: (rule(*each)[0] ** 2).sum(), places)(*inputs) for rule in rules
    )
    for one, other in zip(want_gradients, gradients, strict=True):
        assert mx.abs(one - other).max() < 1e-4


def test_a_width_that_is_no_power_of_two_is_refused(delta_rule: ModuleType) -> None:
    with pytest.raises(ValueError, match="12 is not a power of two"):
        delta_rule.parallel_update(*layer_inputs(12, 0.0))
