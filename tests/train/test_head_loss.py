"""The written-out gradient of the loss against automatic differentiation, and what the loss is zero at."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from outrider.models.trunk import Trunk
from outrider.train import loss as loss_module
from outrider.train.batches import Batch, make_batch
from outrider.train.exchanges import Exchange
from outrider.train.loss import DEPTH_DECAY, HARD_SHARE, loss_and_gradients
from tiny_models import tiny_model


@pytest.fixture(scope="module")
def trunk() -> Trunk:
    return Trunk(tiny_model("granite"), max_context=64)  # whose projection divides the logits


def _batch() -> Batch:
    return make_batch(
        [Exchange((5, 6, 7), (8, 9, 10, 11, 12), False, False), Exchange((5,), (9, 8, 0), True, False)],
        depths=3,
    )


def _some(trunk: Trunk, seed: int) -> mx.array:
    return mx.random.normal((_batch().num_targets, trunk.hidden_size), key=mx.random.key(seed))


def _plain(guesses: list[mx.array], trunk: Trunk, states: mx.array) -> mx.array:
    """The loss as its definition says, for automatic differentiation."""
    batch = _batch()
    target = trunk.logits(states[None])[0]
    log_p = target - mx.logsumexp(target, axis=-1, keepdims=True)
    total = mx.zeros(())
    for depth, guess in enumerate(guesses, 1):
        logits = trunk.logits(guess[None])[0]
        log_q = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        divergence = (mx.exp(log_p) * (log_p - log_q)).sum(axis=-1)
        hard = -mx.take_along_axis(log_q, mx.argmax(target, axis=-1, keepdims=True), axis=-1)[:, 0]
        has_chain = (batch.num_chains >= depth).astype(mx.float32)
        each = has_chain * ((1 - HARD_SHARE) * divergence + HARD_SHARE * hard)
        total = total + DEPTH_DECAY ** (depth - 1) * each.sum() / batch.num_targets
    return total


@pytest.mark.parametrize("logits_at_once", [1 << 25, 300])
def test_loss_and_gradients_equal_automatic_differentiation(
    trunk: Trunk, monkeypatch: pytest.MonkeyPatch, logits_at_once: int
) -> None:
    """In one part, and in parts of two rows."""
    monkeypatch.setattr(loss_module, "MAX_LOGITS", logits_at_once)
    states, guesses = _some(trunk, 1), [_some(trunk, seed) for seed in (2, 3, 4)]
    want, want_gradients = mx.value_and_grad(_plain)(guesses, trunk, states)
    loss, gradients = loss_and_gradients(trunk, guesses, states, _batch())
    assert loss.total == pytest.approx(float(want), rel=1e-5)
    for got, wanted in zip(gradients, want_gradients, strict=True):
        np.testing.assert_allclose(np.array(got), np.array(wanted), rtol=1e-4, atol=1e-7)


def test_a_perfect_guess_diverges_by_nothing(trunk: Trunk) -> None:
    states = _some(trunk, 1)
    loss, _ = loss_and_gradients(trunk, [states, states, _some(trunk, 2)], states, _batch())
    assert loss.divergence[:2] == pytest.approx((0, 0), abs=1e-5)
    assert loss.divergence[2] > 0.1
