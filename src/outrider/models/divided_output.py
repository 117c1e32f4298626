"""The output projection, divided by tokens of the vocabulary: each rank computes the logits of its part.

The parts are gathered. Rank 0 samples from whole logits, which penalties, masks and log-probabilities need.
Rank 0 keeps the whole projection, for whole MTP heads and the log-probabilities of prompts. Other ranks keep
their part only, or the whole embedding where the projection is tied to it.
"""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from outrider.cpu.quantized import interleave, is_kept, new_linear, plain_weights
from outrider.models.trunk import Trunk


class DividedOutput:
    """`Trunk.logits` as an operation of all ranks."""

    def __init__(self, trunk: Trunk, group: mx.distributed.Group) -> None:
        self._model = copy.copy(trunk.projection)  # shares every parameter
        output = GatheredLinear(_own_output(trunk, group), trunk.vocab_size, group)
        mx.eval(output.parameters())
        if "lm_head" in trunk.model:
            self._model.lm_head = output
        else:
            stack = getattr(self._model, trunk.stack_name)
            setattr(self._model, trunk.stack_name, _TiedOutput(stack, trunk.embedding_name, output))

    def __call__(self, hidden: mx.array) -> mx.array:
        """In float32, and launched: all ranks meet here.  [targets, 1, H] -> [targets, 1, vocab]"""
        logits = self._model(hidden).astype(mx.float32)
        mx.async_eval(logits)
        return logits


def rows_of_rank(vocab_size: int, group: mx.distributed.Group) -> slice:
    num = -(-vocab_size // group.size())
    return slice(group.rank() * num, (group.rank() + 1) * num)


def take_rows(layer: nn.Module, rows: slice) -> dict[str, mx.array]:
    """These rows of a layer's arrays. Rows past the last one are zeros."""
    found = {}
    plain = plain_weights(layer) if is_kept(layer) else {}
    for name in ("weight", "scales", "biases", "bias"):
        if layer.get(name) is not None:
            own = plain.get(name, layer[name])[rows]
            missing = rows.stop - rows.start - own.shape[0]
            found[name] = mx.pad(own, [(0, missing), *[(0, 0)] * (own.ndim - 1)]) if missing else own
    return found


class GatheredLinear(nn.Module):
    """This rank's rows of a linear layer. The outputs of all ranks are put together."""

    def __init__(self, linear: nn.Module, num_outputs: int, group: mx.distributed.Group) -> None:
        super().__init__()
        self.linear = linear
        self._num_outputs = num_outputs
        self._group = group

    def __call__(self, x: mx.array) -> mx.array:
        part = self.linear(x.flatten(0, -2))  # [tokens, own outputs]
        parts = mx.distributed.all_gather(part[None], group=self._group)  # [ranks, tokens, own outputs]
        whole = mx.moveaxis(parts, 0, 1).flatten(1)[:, : self._num_outputs]
        return whole.reshape(*x.shape[:-1], -1)

    def as_linear(self, x: mx.array) -> mx.array:
        return self(x)


class _TiedOutput:
    """A stack of layers that is not computed, with another embedding for the output."""

    def __init__(self, stack: Any, embedding_name: str, output: GatheredLinear) -> None:
        self._stack = stack
        self._embedding_name = embedding_name
        self._output = output

    def __call__(self, *inputs: mx.array, **named: mx.array) -> mx.array:
        return self._stack(*inputs, **named)

    def __getattr__(self, name: str) -> Any:
        return self._output if name == self._embedding_name else getattr(self._stack, name)


def _own_output(trunk: Trunk, group: mx.distributed.Group) -> nn.Module:
    """A linear layer with this rank's rows of the output projection."""
    output: nn.Module = trunk.model.lm_head if "lm_head" in trunk.model else trunk.embedding
    if "lm_head" in trunk.model and group.rank() > 0:
        return output  # models/sharding.py has kept these rows only
    return linear_of_rows(output, rows_of_rank(trunk.vocab_size, group))


def linear_of_rows(layer: nn.Module, rows: slice) -> nn.Module:
    """A linear layer with these rows of another one, or of an embedding."""
    arrays = take_rows(layer, rows)
    if is_kept(layer):
        kept = new_linear(arrays, layer.group_size, layer.bits, layer.mode)
        interleave(kept)
        return kept
    if "scales" in layer:
        linear: nn.Module = nn.QuantizedLinear(32, 32, bias=False, group_size=32, bits=layer.bits)
        linear.group_size, linear.mode, linear.biases = layer.group_size, layer.mode, None
    else:
        linear = nn.Linear(1, 1, bias=False)
    for name, array in arrays.items():
        linear[name] = array
    return linear
