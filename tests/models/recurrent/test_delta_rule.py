"""The delta rule in chunks against the rule token by token, and the speed that chunks are for."""

from __future__ import annotations

import time
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from outrider.models.recurrent.delta_rule import chunk_delta_rule
from outrider.models.recurrent.state_space import chunk_ssm
from patience import measures_time


class Case:
    """Random inputs of the size that mlx-lm's layers hand over."""

    def __init__(
        self, rows: int, tokens: int, key_heads: int, heads: int, key_dim: int, value_dim: int
    ) -> None:
        rng = np.random.default_rng(tokens)
        self.q = rng.normal(size=(rows, tokens, key_heads, key_dim)) / key_dim
        self.k = rng.normal(size=(rows, tokens, key_heads, key_dim))
        self.v = rng.normal(size=(rows, tokens, heads, value_dim))
        self.log_gates = -3 * rng.uniform(size=(rows, tokens, heads)) ** 4  # most forget little
        self.betas = 1 / (1 + np.exp(-3 * rng.normal(size=(rows, tokens, heads))))
        self.state = rng.normal(size=(rows, heads, value_dim, key_dim))
        self.normalise()

    def normalise(self) -> None:
        self.k /= np.linalg.norm(self.k, axis=-1, keepdims=True)

    def inputs(self) -> list[mx.array]:
        return [
            mx.array(x.astype(np.float32))
            for x in (self.q, self.k, self.v, self.log_gates, self.betas, self.state)
        ]

    def token_by_token(self, num_tokens: int, row: int) -> tuple[np.ndarray, np.ndarray]:
        """The formula as it is written, in float64: outputs and the state after `num_tokens`."""
        heads, group = self.v.shape[2], self.v.shape[2] // self.k.shape[2]
        state, outputs = self.state[row].copy(), []
        for t in range(num_tokens):
            for h in range(heads):
                gate = np.exp(self.log_gates[row, t, h])  # a number, or one for each key dimension
                k, q = self.k[row, t, h // group], self.q[row, t, h // group]
                state[h] *= gate
                delta = self.betas[row, t, h] * (self.v[row, t, h] - state[h] @ k)
                state[h] += np.outer(delta, k)
                outputs.append(state[h] @ q)
        return np.array(outputs).reshape(num_tokens, heads, self.v.shape[3]), state


CASES = [
    (2, 1, 2, 4, 16, 8),
    (3, 5, 1, 4, 16, 8),
    (2, 9, 2, 2, 32, 32),
    (1, 70, 2, 4, 16, 8),
    (2, 200, 2, 2, 8, 8),
]


@pytest.mark.parametrize("shape", CASES)
@pytest.mark.parametrize("gates", ["by head", "by dimension"])
@pytest.mark.parametrize("keys", ["random", "all the same"])
def test_chunks_equal_the_rule_token_by_token(shape: tuple[int, ...], gates: str, keys: str) -> None:
    case = Case(*shape)
    if keys == "all the same":  # where a careless inverse of the triangle grows without bound
        case.k[:] = case.k[:, :1]
    if gates == "by dimension":
        rng = np.random.default_rng(3)
        case.log_gates = case.log_gates[..., None] * rng.uniform(size=(1, 1, 1, shape[4]))
    got, update = chunk_delta_rule(*case.inputs())
    tokens = shape[1]
    first_of_last_chunk = update.offset
    kept = [min(tokens, first_of_last_chunk + row) for row in range(shape[0])]
    states = np.array(update.state_after(mx.array(kept)))
    for row in range(shape[0]):
        want, _ = case.token_by_token(tokens, row)
        np.testing.assert_allclose(np.array(got[row]), want, atol=2e-5)
        _, state = case.token_by_token(kept[row], row)
        np.testing.assert_allclose(states[row], state, atol=2e-5)


@pytest.mark.parametrize("chunk", [1, 3, 16, 64])
def test_the_size_of_chunks_does_not_matter(chunk: int) -> None:
    case = Case(2, 50, 2, 4, 16, 8)
    got, update = chunk_delta_rule(*case.inputs(), chunk=chunk)
    want, state = case.token_by_token(50, 1)
    np.testing.assert_allclose(np.array(got[1]), want, atol=2e-5)
    np.testing.assert_allclose(np.array(update.state_after(mx.array([50, 50]))[1]), state, atol=2e-5)


def test_padding_leaves_no_trace() -> None:
    case = Case(2, 40, 2, 4, 16, 8)
    case.betas[0, 13:] = case.log_gates[0, 13:] = 0
    _, update = chunk_delta_rule(*case.inputs())
    _, state = case.token_by_token(13, 0)
    np.testing.assert_allclose(np.array(update.state_after(mx.array([13, 40]))[0]), state, atol=2e-5)


def test_nothing_kept_is_the_state_before() -> None:
    case = Case(2, 4, 2, 4, 16, 8)
    _, update = chunk_delta_rule(*case.inputs())
    np.testing.assert_array_equal(np.array(update.state_after(mx.array([0, 0]))), case.inputs()[5])


def test_gates_that_forget_everything_stay_finite() -> None:
    case = Case(1, 40, 2, 4, 16, 8)
    case.log_gates[:, ::3] = -1e4
    got, update = chunk_delta_rule(*case.inputs())
    want, state = case.token_by_token(40, 0)
    np.testing.assert_allclose(np.array(got[0]), want, atol=2e-5)
    np.testing.assert_allclose(np.array(update.state_after(mx.array([40]))[0]), state, atol=2e-5)


@pytest.mark.parametrize("tokens", [1, 7, 64, 150])
def test_a_state_space_in_chunks_equals_it_token_by_token(tokens: int) -> None:
    rng = np.random.default_rng(tokens)
    x, steps = rng.normal(size=(2, tokens, 4, 8)), rng.uniform(size=(2, tokens, 4))
    rates = -rng.uniform(size=4)
    b, c = rng.normal(size=(2, tokens, 2, 16)), rng.normal(size=(2, tokens, 2, 16))
    state = rng.normal(size=(2, 4, 8, 16))
    inputs = [mx.array(a.astype(np.float32)) for a in (x, steps, steps * rates, b, c, state)]
    got, update = chunk_ssm(*inputs)
    for t in range(tokens):
        for h in range(4):
            for row in range(2):
                state[row, h] *= np.exp(steps[row, t, h] * rates[h])
                state[row, h] += np.outer(steps[row, t, h] * x[row, t, h], b[row, t, h // 2])
                want = state[row, h] @ c[row, t, h // 2]
                np.testing.assert_allclose(np.array(got[row, t, h]), want, atol=1e-4)
    after = update.state_after(mx.array([tokens, tokens]))
    np.testing.assert_allclose(np.array(after), state, atol=1e-4)


@measures_time
def test_a_prompt_of_512_tokens_is_five_times_as_fast_as_token_by_token() -> None:
    from mlx_lm.models.gated_delta import gated_delta_ops

    inputs = Case(1, 512, 8, 16, 64, 64).inputs()
    q, k, v, log_gates, betas, state = inputs

    def in_chunks() -> None:
        out, update = chunk_delta_rule(*inputs)
        mx.eval(out, update.state_after(mx.array([512])))

    def token_by_token() -> None:
        mx.eval(gated_delta_ops(q, k, v, mx.exp(log_gates), betas, state))

    in_chunks()
    ratios = [_seconds(token_by_token) / _seconds(in_chunks) for _ in range(4)]
    assert max(ratios) >= 5, ratios


def _seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
