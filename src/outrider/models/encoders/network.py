"""An encoder with BERT's layers, over inputs of any lengths in one pass and without padding.

The tokens of all inputs of a pass lie one behind the other in `hidden` [tokens, hidden]: linear layers and
norms see each token alone. Only attention knows the inputs. Inputs of equal length attend as one batch:

    hidden     a a a | b b b | c c c c c       groups: (2 inputs, 3 tokens), (1 input, 5 tokens)

So an input's vector does not depend on its neighbours (tests/models/encoders/test_encoder_model.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from outrider.cpu import fast_math
from outrider.models.encoders.families import EncoderShape

Groups = Sequence[tuple[int, int]]  # (inputs, tokens of each), in the order of the pass
Biases = Mapping[int, mx.array]  # of attention scores [heads, tokens, tokens], by tokens of an input

MAX_DISTANCE = 128  # tokens: all that are further apart share a bucket, as in MPNet
_LOG2_E = math.log2(math.e)
# Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26: erf(x) to 1.5e-7
_ERF_P, _ERF_COEFFICIENTS = 0.3275911, (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)


def gelu(x: mx.array) -> mx.array:
    """x / 2 (1 + erf(x / sqrt 2)). On x86, MLX's `erf` takes half of a layer's time: see cpu/fast_math.py.

    With tail = 1 - erf(|x| / sqrt 2), it is max(x, 0) - |x| tail / 2.
    """
    if x.dtype != mx.float32 or not fast_math.applies():
        return nn.gelu(x)
    size = mx.abs(x)
    t = 1 / (1 + (_ERF_P / math.sqrt(2)) * size)
    polynomial = mx.zeros((), mx.float32)
    for coefficient in _ERF_COEFFICIENTS:
        polynomial = (polynomial + coefficient) * t
    tail = polynomial * mx.power(mx.array(2.0), (-_LOG2_E / 2) * size * size)
    return mx.maximum(x, 0) - 0.5 * size * tail


_ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "gelu": gelu,
    "gelu_python": gelu,
    "gelu_new": nn.gelu_approx,
    "gelu_pytorch_tanh": nn.gelu_approx,
    "relu": nn.relu,
    "silu": nn.silu,
    "swish": nn.silu,
    "tanh": mx.tanh,
}


class EncoderLayer(nn.Module):
    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        size = shape.hidden_size
        self.query, self.key, self.value = (nn.Linear(size, size) for _ in range(3))
        self.attended = nn.Linear(size, size)
        self.attended_norm = nn.LayerNorm(size, eps=shape.eps)
        self.expand = nn.Linear(size, shape.intermediate_size)
        self.contract = nn.Linear(shape.intermediate_size, size)
        self.contracted_norm = nn.LayerNorm(size, eps=shape.eps)
        self._num_heads = shape.num_heads
        self._activation = _ACTIVATIONS[shape.activation]

    def __call__(self, hidden: mx.array, groups: Groups, biases: Biases) -> mx.array:
        """[tokens, hidden] -> [tokens, hidden]"""
        queries, keys, values = self.query(hidden), self.key(hidden), self.value(hidden)
        attended, first = [], 0
        for num_inputs, length in groups:
            last = first + num_inputs * length
            q, k, v = (self._heads(x[first:last], num_inputs) for x in (queries, keys, values))
            attended.append(_joined(attention(q, k, v, biases.get(length))))
            first = last
        return self._finish(hidden, attended[0] if len(attended) == 1 else mx.concatenate(attended))

    def keys_values(self, hidden: mx.array) -> tuple[mx.array, mx.array]:
        """Of a part of one long input.  [tokens, hidden] -> [1, heads, tokens, dim]"""
        return self._heads(self.key(hidden), 1), self._heads(self.value(hidden), 1)

    def part(self, hidden: mx.array, keys: mx.array, values: mx.array, bias: mx.array | None) -> mx.array:
        """The layer for a part of one long input, whose keys and values are all there.

        `bias` [heads, tokens of the part, tokens of the input]
        """
        queries = self._heads(self.query(hidden), 1)
        return self._finish(hidden, _joined(attention(queries, keys, values, bias)))

    def _finish(self, hidden: mx.array, attended: mx.array) -> mx.array:
        hidden = self.attended_norm(self.attended(attended) + hidden)
        return self.contracted_norm(self.contract(self._activation(self.expand(hidden))) + hidden)

    def _heads(self, x: mx.array, num_inputs: int) -> mx.array:
        """[tokens, hidden] -> [inputs, heads, tokens of each, dim]"""
        return x.reshape(num_inputs, -1, self._num_heads, x.shape[-1] // self._num_heads).swapaxes(1, 2)


def _joined(x: mx.array) -> mx.array:
    """[inputs, heads, tokens of each, dim] -> [tokens, hidden]"""
    return x.swapaxes(1, 2).reshape(x.shape[0] * x.shape[2], -1)


def attention(queries: mx.array, keys: mx.array, values: mx.array, bias: mx.array | None) -> mx.array:
    """Attention in both directions, without a mask. On x86 with powers of two: see cpu/fast_math.py."""
    scale = queries.shape[-1] ** -0.5
    if queries.dtype != mx.float32 or not fast_math.applies():
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=bias)
    scores = (queries * (scale * _LOG2_E)) @ keys.swapaxes(2, 3)
    if bias is not None:
        scores = scores + bias * _LOG2_E
    weights = mx.power(mx.array(2.0), scores - scores.max(axis=-1, keepdims=True))
    return (weights @ values) / weights.sum(axis=-1, keepdims=True)


def distance_buckets(length: int, num_buckets: int) -> mx.array:
    """The bucket of the distance between each two tokens, as in T5: near ones have buckets of their own, far
    ones share buckets whose widths grow.  [tokens, tokens]"""
    positions = np.arange(length)
    distances = positions[None, :] - positions[:, None]
    half = num_buckets // 2  # for tokens before; the other half for tokens behind
    exact, far = half // 2, np.maximum(np.abs(distances), 1).astype(np.float32)
    widths = np.float32(math.log(MAX_DISTANCE / exact))  # in float32, as the model was trained
    wider = exact + np.log(far / np.float32(exact)) / widths * np.float32(half - exact)
    buckets = np.where(np.abs(distances) < exact, np.abs(distances), np.minimum(wider.astype(int), half - 1))
    return mx.array(np.where(distances > 0, half, 0) + buckets)


class ScoreHead(nn.Module):
    """The classification head of a reranker, over the state of the first token."""

    def __init__(self, size: int, activation: str) -> None:
        super().__init__()
        self.dense = nn.Linear(size, size)
        self.score = nn.Linear(size, 1)
        self._activation = _ACTIVATIONS[activation]

    def __call__(self, states: mx.array) -> mx.array:
        """[inputs, hidden] -> [inputs, 1]"""
        return self.score(self._activation(self.dense(states)))


class Encoder(nn.Module):
    """`head_activation`: of the classification head; None: there is no head."""

    def __init__(self, shape: EncoderShape, head_activation: str | None = None) -> None:
        super().__init__()
        size = shape.hidden_size
        self.words = nn.Embedding(shape.vocab_size, size)
        self.positions = nn.Embedding(shape.num_positions, size)
        if shape.num_types:
            self.types = nn.Embedding(shape.num_types, size)
        if shape.num_buckets:
            self.distances = nn.Embedding(shape.num_buckets, shape.num_heads)
        self.norm = nn.LayerNorm(size, eps=shape.eps)
        self._num_buckets = shape.num_buckets
        self.layers = [EncoderLayer(shape) for _ in range(shape.num_layers)]
        if head_activation is not None:
            self.head = ScoreHead(size, head_activation)

    def embed(self, ids: mx.array, positions: mx.array, types: mx.array) -> mx.array:
        """[tokens] each -> [tokens, hidden]"""
        hidden = self.words(ids) + self.positions(positions)
        if "types" in self:
            hidden = hidden + self.types(mx.minimum(types, self.types.weight.shape[0] - 1))
        return self.norm(hidden)

    def biases(self, groups: Groups) -> Biases:
        """What is added to the attention scores in all layers, by the length of an input."""
        if not self._num_buckets:
            return {}
        return {length: self._bias(length) for _, length in groups}

    def _bias(self, length: int) -> mx.array:
        """[heads, tokens, tokens]"""
        return self.distances(distance_buckets(length, self._num_buckets)).transpose(2, 0, 1)
