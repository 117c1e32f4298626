"""Quantised layers whose matmuls are computed for all tokens of a pass at once. For CUDA.

MLX's CUDA backend takes the leading dimensions of a quantised matmul for a batch of matmuls, and reads the
weights for each of them. So rows and columns of a pass become one dimension here. Up to cuda_qmm.MAX_TOKENS
tokens are computed by Outrider's own kernels; more tokens and other formats by MLX's. For the many tokens of
a prompt the weights are dequantised first: an ordinary matmul is so much faster that this pays. The copies
live until the device has used them. Passes over prompts wait for the device, so only a few layers' copies
exist at once (cache/placement.py); models/copied_weights.py counts them. Decode passes do not wait, and use
the quantised weights. On Metal MLX makes them one dimension by itself, so nothing is swapped there. See
models/layer_swaps.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from outrider.models import cuda_qmm
from outrider.plan import is_wide_prompt_pass

MAX_EXPERT_PAIRS = 512  # of a token and an expert, for cuda_qmm; chosen by hand: 8 and 64 were measured
MAX_DEQUANTIZED_BYTES = 1 << 29  # of one matrix; chosen by hand

OnCopy = Callable[[int], None]  # takes the bytes of a copy
_on_copy: ContextVar[OnCopy | None] = ContextVar("on_copy", default=None)


def applies() -> bool:
    return cuda_qmm.is_available()


def use_flat_matmuls(model: nn.Module) -> None:
    """Swap the layers of a model; layers that are swapped already stay."""
    for _, module in model.named_modules():
        if type(module) in _CLASSES:
            module.has_kernel = cuda_qmm.supports(module)
            module.__class__ = _CLASSES[type(module)]


def plain_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The class that a layer had before `use_flat_matmuls`."""
    return next((plain for plain, flat in _CLASSES.items() if flat is kind), kind)


@contextmanager
def reported_copies(on_copy: OnCopy) -> Iterator[None]:
    """While the context is open, `on_copy` is called for each dequantised copy that a pass is built with."""
    token = _on_copy.set(on_copy)
    try:
        yield
    finally:
        _on_copy.reset(token)


class FlatQuantizedLinear(nn.QuantizedLinear):
    has_kernel: bool

    def __call__(self, x: mx.array) -> mx.array:
        out = _matmul(self, x)
        return out + self["bias"] if "bias" in self else out


class FlatQuantizedEmbedding(nn.QuantizedEmbedding):
    """The embedding of a model whose output projection is its transpose."""

    has_kernel: bool

    def as_linear(self, x: mx.array) -> mx.array:
        return _matmul(self, x)


class FlatQuantizedSwitchLinear(QuantizedSwitchLinear):
    """The experts of a mixture of experts. Each token of each expert is a vector product."""

    has_kernel: bool

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        num_inputs = x.size // x.shape[-1]
        is_vectors = x.shape[-2] == 1 and x.shape[:-2] in (indices.shape, (*indices.shape[:-1], 1))
        if not (self._is_for_kernel(x) and is_vectors and indices.size <= MAX_EXPERT_PAIRS):
            plain: mx.array = super().__call__(x, indices, sorted_indices)
            return plain
        experts = indices.flatten().astype(mx.uint32)
        out = cuda_qmm.gather_matmul(x.reshape(num_inputs, -1), experts, self)
        out = out.reshape(*indices.shape, 1, -1)
        return out + mx.expand_dims(self["bias"][indices], -2) if "bias" in self else out

    def _is_for_kernel(self, x: mx.array) -> bool:
        return self.has_kernel and x.dtype == self.scales.dtype


def _matmul(layer: nn.Module, x: mx.array) -> mx.array:
    """x [..., inputs] -> [..., outputs]"""
    tokens = x.reshape(-1, x.shape[-1])
    if layer.has_kernel and len(tokens) <= cuda_qmm.MAX_TOKENS and x.dtype == layer.scales.dtype:
        out = cuda_qmm.matmul(tokens, layer)
    elif _is_worth_dequantizing(layer, x):
        out = tokens @ _dequantized(layer).T
    else:
        out = mx.quantized_matmul(
            tokens,
            layer["weight"],
            scales=layer["scales"],
            biases=layer.get("biases"),
            transpose=True,
            group_size=layer.group_size,
            bits=layer.bits,
            mode=layer.mode,
        )
    return out.reshape(*x.shape[:-1], -1)


def _is_worth_dequantizing(layer: nn.Module, x: mx.array) -> bool:
    """H200, 2560 x 9728 in 4 bits: 0.18 ms instead of 0.32 for 512 tokens, 0.36 instead of 0.86 for 2,048;
    in 8 bits 0.28 instead of 0.25, and 0.39 instead of 0.73."""
    num_inputs = x.shape[-1]
    width = x.shape[-2] if x.ndim > 1 else 1  # some experts are called with a single token
    is_wide = is_wide_prompt_pass(x.size // num_inputs, width)
    num_bytes = layer["weight"].shape[0] * num_inputs * x.dtype.size
    is_16_bit = layer.mode == "affine" and x.dtype == layer["scales"].dtype != mx.float32
    return is_16_bit and is_wide and num_bytes <= MAX_DEQUANTIZED_BYTES


def _dequantized(layer: nn.Module) -> mx.array:
    copy = mx.dequantize(
        layer["weight"], layer["scales"], layer.get("biases"), layer.group_size, layer.bits, layer.mode
    )
    if (on_copy := _on_copy.get()) is not None:
        on_copy(copy.nbytes)
    return copy


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    nn.QuantizedLinear: FlatQuantizedLinear,
    nn.QuantizedEmbedding: FlatQuantizedEmbedding,
    QuantizedSwitchLinear: FlatQuantizedSwitchLinear,
}
