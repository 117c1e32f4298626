"""Recurrent layers of the native extension against NumPy, and to the bit against themselves."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from outrider.cpu.recurrence import TokenInputs
from outrider.cpu.threads import thread_counts

pytestmark = pytest.mark.usefixtures("native")

ROWS, TOKENS, KEY_HEADS, HEADS = 3, 11, 2, 4


def made_up(key_dim: int, value_dim: int, by_dimension: bool, is_delta_rule: bool) -> TokenInputs:
    mx.random.seed(key_dim + value_dim)
    keys = mx.random.normal((2, ROWS, TOKENS, KEY_HEADS, key_dim)) * key_dim**-0.5
    gates = (ROWS, TOKENS, HEADS, key_dim) if by_dimension else (ROWS, TOKENS, HEADS)
    return TokenInputs(
        queries=keys[0],
        keys=keys[1],
        values=mx.random.normal((ROWS, TOKENS, HEADS, value_dim)),
        log_gates=-mx.random.uniform(0, 0.5, gates),
        betas=mx.random.uniform(0, 1, (ROWS, TOKENS, HEADS)),
        is_delta_rule=is_delta_rule,
    )


def state_for(inputs: TokenInputs) -> mx.array:
    shape = ROWS, HEADS, inputs.values.shape[-1], inputs.keys.shape[-1]
    return mx.random.normal(shape, key=mx.random.key(7))


def in_float64(inputs: TokenInputs, state: mx.array, counts: list[int]) -> tuple[np.ndarray, np.ndarray]:
    q, k, v, log_gates, betas, s = (
        np.array(x, np.float64)
        for x in (inputs.queries, inputs.keys, inputs.values, inputs.log_gates, inputs.betas, state)
    )
    q, k = (np.repeat(x, HEADS // KEY_HEADS, axis=2) for x in (q, k))
    gates = np.exp(log_gates if log_gates.ndim == 4 else log_gates[..., None])
    outputs, after = np.zeros(v.shape), s.copy()
    for t in range(TOKENS):
        s = s * gates[:, t, :, None]
        read = np.einsum("rhvk,rhk->rhv", s, k[:, t]) if inputs.is_delta_rule else 0
        s = s + np.einsum("rhv,rhk->rhvk", betas[:, t, :, None] * (v[:, t] - read), k[:, t])
        outputs[:, t] = np.einsum("rhvk,rhk->rhv", s, q[:, t])
        ended = np.array(counts) == t + 1
        after[ended] = s[ended]
    return outputs, after


KINDS = [
    (64, 64, False, True), (24, 20, True, True), (8, 16, False, False), (128, 40, False, False),
    (64, 24, True, True),
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_states_are_those_of_numpy(kind: Any) -> None:
    inputs, counts = made_up(*kind), [TOKENS, 0, 4]
    state = state_for(inputs)
    found = inputs.outputs_and_state(state, mx.array(counts))
    for one, expected in zip(found, in_float64(inputs, state, counts), strict=True):
        np.testing.assert_allclose(np.array(one), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_floats_may_lie_anywhere_in_memory(kind: Any) -> None:
    """Also where no vector of an instruction set would be aligned."""
    inputs, counts = made_up(*kind), mx.array([TOKENS, 0, 4])
    state = state_for(inputs)
    moved = replace(
        inputs,
        **{name: one_float_further(getattr(inputs, name)) for name in ("queries", "keys", "values", "betas")},
        log_gates=one_float_further(inputs.log_gates),
    )
    found = moved.outputs_and_state(one_float_further(state), counts)
    for one, expected in zip(found, inputs.outputs_and_state(state, counts), strict=True):
        assert mx.array_equal(one, expected)


def one_float_further(array: mx.array) -> mx.array:
    """The same numbers, four bytes behind the beginning of their memory."""
    room = mx.concatenate([mx.zeros(1), array.flatten()])
    mx.eval(room)
    return room[1:].reshape(array.shape)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_is_the_same_to_the_bit_however_the_text_is_cut(native: ModuleType, kind: Any) -> None:
    inputs = made_up(*kind)
    state = state_for(inputs)
    whole, after_all = inputs.outputs_and_state(state, mx.full(ROWS, TOKENS))
    for num_threads, cuts in ((1, (0, 1, 2, 7, TOKENS)), (3, (0, 5, 6, TOKENS))):
        native.set_num_threads(num_threads)
        current, outputs = state, []
        for begin, end in pairwise(cuts):
            part = TokenInputs(*_cut(inputs, begin, end), inputs.is_delta_rule)
            outputs.append(part.outputs(current))
            current = part.state_after(current, mx.full(ROWS, end - begin))
        assert mx.array_equal(mx.concatenate(outputs, axis=1), whole)
        assert mx.array_equal(current, after_all)
    native.set_num_threads(thread_counts({}).max)


def _cut(inputs: TokenInputs, begin: int, end: int) -> list[mx.array]:
    parts = inputs.queries, inputs.keys, inputs.values, inputs.log_gates, inputs.betas
    return [part[:, begin:end] for part in parts]


def test_a_row_does_not_depend_on_its_neighbours_or_on_padding() -> None:
    inputs = made_up(*KINDS[0])
    state = state_for(inputs)
    fed = mx.arange(TOKENS)[:, None] < 6  # [tokens, 1]
    padded = replace(
        inputs, betas=mx.where(fed, inputs.betas, 0), log_gates=mx.where(fed, inputs.log_gates, 0)
    )
    whole, after = inputs.outputs_and_state(state, mx.full(ROWS, 6))
    out, after_padding = padded.outputs_and_state(state, mx.full(ROWS, TOKENS))
    assert mx.array_equal(out[:, :6], whole[:, :6])
    assert mx.array_equal(after_padding, after)
    alone = TokenInputs(*(part[1:2] for part in _cut(inputs, 0, TOKENS)), inputs.is_delta_rule)
    assert mx.array_equal(alone.outputs(state[1:2])[0], whole[1])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"queries": mx.zeros((ROWS, TOKENS, KEY_HEADS, 8))}, "queries and keys differ"),
        ({"values": mx.zeros((ROWS, TOKENS, 3, 64))}, "do not belong together"),
        ({"betas": mx.zeros((ROWS, TOKENS, 1))}, "needs a beta"),
        ({"log_gates": mx.zeros((ROWS, TOKENS, HEADS, 2))}, "needs a gate"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change: dict[str, mx.array], reason: str) -> None:
    inputs = made_up(*KINDS[0])
    with pytest.raises(ValueError, match=reason):
        replace(inputs, **change).outputs_and_state(state_for(inputs), mx.full(ROWS, TOKENS))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs a count"):
        inputs.outputs_and_state(state_for(inputs), mx.array([1]))
    with pytest.raises(ValueError, match="needs a state"):
        inputs.outputs_and_state(state_for(inputs)[:, :1], mx.full(ROWS, TOKENS))
