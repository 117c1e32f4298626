"""The training pass over whole sequences does what the engine does pair by pair, in families of all kinds."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from outrider.cache.placement import Placement
from outrider.cache.ragged_kv import LayerView, RaggedKV
from outrider.models.heads import HeadSpec, MTPHead, head_kv_spec, new_head
from outrider.models.trunk import Trunk
from outrider.train.chain import chain_outputs
from ragged_rows import error
from tiny_models import fill, tiny_model

WIDTH, DEPTHS = 9, 3
FAMILIES = [  # plain, normed queries, experts, latent attention, windows, sinks, a scale before the mask
    "llama", "qwen3", "qwen3_moe", "deepseek_v3", "minicpm3", "gemma3_text", "gpt_oss", "ministral3", "olmo2",
]  # fmt: skip


def _head(family: str, spec: HeadSpec | None = None) -> tuple[Trunk, MTPHead]:
    trunk = Trunk(tiny_model(family), max_context=64)
    head = new_head(trunk, spec)
    fill(head, seed=3)
    return trunk, head


def _inputs(trunk: Trunk) -> tuple[mx.array, mx.array]:
    shape = (2, WIDTH, trunk.hidden_size)
    return mx.random.normal(shape, key=mx.random.key(1)), mx.random.normal(shape, key=mx.random.key(2))


def _drafted(head: MTPHead, trunk: Trunk, hidden: mx.array, embedded: mx.array, start: int) -> list[mx.array]:
    """The outputs of the chain at `start`, as the engine computes them: committed pairs, then one by one."""
    kv = RaggedKV(head_kv_spec(head, trunk))
    kv.resize(2, 32)

    def feed(hidden: mx.array, embedded: mx.array, at: int) -> tuple[mx.array, mx.array]:
        width = hidden.shape[1]
        place = Placement([0, 1], mx.full((2,), at), mx.full((2,), width), width, at + width, 32)
        return head(hidden, embedded, LayerView(kv, place))

    out, fed_back = feed(hidden[:, : start + 1], embedded[:, 1 : start + 2], 0)
    outputs = [out[:, -1]]
    for depth in range(2, DEPTHS + 1):
        token = start + depth
        out, fed_back = feed(fed_back[:, -1:], embedded[:, token : token + 1], start + depth - 1)
        outputs.append(out[:, -1])
    return outputs


@pytest.mark.parametrize("family", FAMILIES)
def test_every_chain_equals_the_engines_passes(family: str) -> None:
    trunk, head = _head(family)
    hidden, embedded = _inputs(trunk)
    together = chain_outputs(head, hidden, embedded, DEPTHS)
    for start in (0, 2, WIDTH - DEPTHS - 1):
        for out, want in zip(together, _drafted(head, trunk, hidden, embedded, start), strict=True):
            assert error(np.array(out[:, start]), np.array(want)) <= 1e-5


def test_recursion_follows_the_heads_spec() -> None:
    trunk, head = _head("llama", HeadSpec(embedding_first=False, recurse_after_norm=False))
    hidden, embedded = _inputs(trunk)
    together = chain_outputs(head, hidden, embedded, DEPTHS)
    for out, want in zip(together, _drafted(head, trunk, hidden, embedded, 3), strict=True):
        assert error(np.array(out[:, 3]), np.array(want)) <= 1e-5


def test_a_chain_sees_no_later_token_and_no_other_chain() -> None:
    trunk, head = _head("qwen3")
    hidden, embedded = _inputs(trunk)
    before = chain_outputs(head, hidden, embedded, DEPTHS)
    embedded[:, 6] = 9.0  # the chain at t reads the tokens up to t + depth
    hidden[:, 5] = 9.0
    after = chain_outputs(head, hidden, embedded, DEPTHS)
    for depth in range(1, DEPTHS + 1):
        same = [
            t for t in range(WIDTH - depth) if np.array_equal(before[depth - 1][:, t], after[depth - 1][:, t])
        ]
        assert same == [t for t in range(WIDTH - depth) if t < 5 and t + depth < 6]


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
def test_gradients_reach_every_weight_from_the_deepest_draft(family: str) -> None:
    trunk, head = _head(family)
    hidden, embedded = _inputs(trunk)

    def deepest(head: MTPHead) -> mx.array:
        out = chain_outputs(head, hidden, embedded, DEPTHS)[-1][:, : WIDTH - DEPTHS]
        return (out * mx.random.normal(out.shape, key=mx.random.key(4))).sum()

    _, gradients = nn.value_and_grad(head, deepest)(head)
    named = dict(tree_flatten(gradients))
    assert all(mx.isfinite(array).all().item() for array in named.values())
    still = {name for name, array in named.items() if mx.abs(array).max().item() == 0}
    assert all("correction_bias" in name for name in still)  # chooses experts, and is not differentiable
