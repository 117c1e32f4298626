"""Ropes with a position for each token: equal to the model's own rope, token by token."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.rope_utils import initialize_rope

from outrider.cache.placement import GridPositions
from outrider.config import InvalidConfig
from outrider.models.gap_rope import GapRope, use_gap_ropes
from outrider.models.trunk import Trunk
from tiny_models import tiny_model

SCALED: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}


@pytest.mark.parametrize("kind", SCALED)
def test_each_token_is_turned_by_its_own_position(kind: str) -> None:
    plain = initialize_rope(16, 10000.0, False, SCALED[kind], 256)
    x = mx.random.normal((2, 3, 5, 16), key=mx.random.key(1))
    positions = np.array([[0, 1, 7, 8, 200], [3, 90, 91, 92, 93]])
    turned = GapRope(plain)(x, offset=GridPositions(mx.array(np.broadcast_to(positions, (3, 2, 5)))))
    for row, own in enumerate(positions):
        for column, position in enumerate(own):
            one = plain(x[row : row + 1, :, column : column + 1], offset=int(position))
            assert mx.array_equal(turned[row : row + 1, :, column : column + 1], one)


def test_an_offset_goes_to_the_models_own_rope() -> None:
    plain = initialize_rope(16, 10000.0, False, None, 256)
    x = mx.random.normal((2, 3, 5, 16), key=mx.random.key(2))
    assert mx.array_equal(GapRope(plain)(x, offset=mx.array([4, 9])), plain(x, offset=mx.array([4, 9])))


def test_ropes_are_replaced_once() -> None:
    model = tiny_model("llama")
    for _ in range(2):
        use_gap_ropes(model)
    ropes = [layer.self_attn.rope for layer in model.layers]
    assert all(isinstance(rope, GapRope) and not isinstance(rope.plain, GapRope) for rope in ropes)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("qwen3_next", "recurrent layers"),
        ("gemma3_text", "sliding windows"),
        ("gpt2", "not rope's"),
    ],
)
def test_models_that_cannot_skip_tokens_are_refused_with_the_reason(family: str, reason: str) -> None:
    trunk = Trunk(tiny_model(family), max_context=256)
    with pytest.raises(InvalidConfig, match=f"{family} cannot skip tokens of prompts: .*{reason}"):
        trunk.allow_gaps()
