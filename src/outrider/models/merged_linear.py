"""Merges linear layers that read the same input into one matmul: q, k and v; gate and up. For GPUs.

With few tokens, a matmul takes a GPU little longer than its launch, so fewer matmuls make faster steps. (vLLM
has QKVParallelLinear and MergedColumnParallelLinear for this, one class for each model. Here the layers are
found in a dry run, for any model.)

The weights are concatenated into one array, and each layer's own weights become views of it. Names, shapes,
values and bytes of the model's parameters stay the same. The layers become subclasses of their classes. The
first layer that is called computes the outputs of all of them. See models/layer_swaps.py.
"""

from __future__ import annotations

import copy
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from outrider.models.quantized_layers import FlatQuantizedLinear

ROWS_STEP = 8  # output rows: every part begins at a multiple, so that GPUs read aligned vectors


class _Outputs(NamedTuple):
    """The outputs of the last matmul that their layers have not fetched yet."""

    input: weakref.ref[mx.array]
    by_part: dict[int, mx.array]


class MergedLinear:
    """The weights of several layers as one matmul, and the outputs of its last call.

    A layer is called with its input and nothing else, so the outputs wait here, for exactly that input array.
    An output is released when its layer fetches it, the rest when the input is released. Another input, or an
    output that is fetched twice, starts a new matmul. So layers may be called in any order, by several
    threads, and some may not be called at all. The input must not be changed in place between two of the
    calls: it would still be the same array.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        """Concatenates the weights of the layers and leaves each layer a view of its part."""
        names = list(_arrays(layers[0]))
        self._linear = copy.copy(layers[0])
        self._ends = list(accumulate(layer.weight.shape[0] for layer in layers))[:-1]
        self._outputs: _Outputs | None = None
        for name in names:
            whole = mx.concatenate([layer[name] for layer in layers])
            mx.eval(whole)
            views = mx.split(whole, self._ends)
            mx.eval(views)
            self._linear[name] = whole
            for layer, view in zip(layers, views, strict=True):
                layer[name] = view
        for part, layer in enumerate(layers):
            layer.merged, layer.part = self, part
            layer.__class__ = _PART_CLASSES[type(layer)]

    def output(self, part: int, x: mx.array) -> mx.array:
        outputs = self._outputs
        if outputs is None or outputs.input() is not x or part not in outputs.by_part:
            found = mx.split(self._linear(x), self._ends, axis=-1)
            outputs = self._outputs = _Outputs(weakref.ref(x, self._release), dict(enumerate(found)))
        return outputs.by_part.pop(part)

    def _release(self, input: weakref.ref[mx.array]) -> None:
        if self._outputs is not None and self._outputs.input is input:
            self._outputs = None


class _Part:
    merged: MergedLinear
    part: int

    def __call__(self, x: mx.array) -> mx.array:
        return self.merged.output(self.part, x)


class MergedLinearPart(_Part, nn.Linear):
    pass


class MergedQuantizedLinearPart(_Part, nn.QuantizedLinear):
    pass


class MergedFlatQuantizedLinearPart(_Part, FlatQuantizedLinear):
    pass


_PART_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: MergedLinearPart,
    nn.QuantizedLinear: MergedQuantizedLinearPart,
    FlatQuantizedLinear: MergedFlatQuantizedLinearPart,
}


def merge(model: nn.Module, dry_run: Callable[[], object]) -> None:
    """Merge the layers of a model that a dry run calls with the same arrays.

    For models that are served: weights must not be changed afterwards.
    """
    for layers in _with_same_input(model, dry_run):
        for alike in _by_format(layers):
            if len(alike) > 1:
                MergedLinear(alike)
                mx.clear_cache()  # at any time only one merged matmul's weights exist twice


def plain_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The class that a layer had before `merge`."""
    return next((plain for plain, part in _PART_CLASSES.items() if part is kind), kind)


def _with_same_input(model: nn.Module, dry_run: Callable[[], object]) -> list[list[nn.Module]]:
    """The linear layers of a model, grouped by the arrays that they are called with."""
    # Subclasses of nn.Linear are left out: adapters, and layers that are spread over machines.
    layers = [module for _, module in model.named_modules() if type(module) in _PART_CLASSES]
    found: dict[Hashable, list[nn.Module]] = defaultdict(list)
    with _recorded_inputs(layers) as inputs:
        dry_run()
        for layer, arrays in zip(layers, inputs, strict=True):
            if arrays:
                found[tuple(id(x) for x in arrays)].append(layer)  # `inputs` keeps the arrays alive
    return list(found.values())


@contextmanager
def _recorded_inputs(layers: Sequence[nn.Module]) -> Iterator[list[list[mx.array]]]:
    """The arrays that each layer is called with while the context is open."""
    inputs: list[list[mx.array]] = [[] for _ in layers]

    def recording(kind: type[nn.Module], into: list[mx.array]) -> type[nn.Module]:
        def call(self: nn.Module, x: mx.array) -> mx.array:
            into.append(x)
            return kind.__call__(self, x)

        return type(kind.__name__, (kind,), {"__call__": call})

    kinds = [type(layer) for layer in layers]
    for layer, kind, into in zip(layers, kinds, inputs, strict=True):
        layer.__class__ = recording(kind, into)
    try:
        yield inputs
    finally:
        for layer, kind, into in zip(layers, kinds, inputs, strict=True):
            layer.__class__ = kind
            into.clear()  # the arrays hold the weights of the graph that led to them


def _by_format(layers: Iterable[nn.Module]) -> list[list[nn.Module]]:
    """Layers whose weights can be concatenated: the same kind, quantisation, dtype and input size."""
    found: dict[Hashable, list[nn.Module]] = defaultdict(list)
    for layer in layers:
        if layer.weight.shape[0] % ROWS_STEP == 0:
            arrays = [(name, one.shape[1:], one.dtype) for name, one in sorted(_arrays(layer).items())]
            quantisation = [getattr(layer, name, None) for name in ("bits", "group_size", "mode")]
            found[type(layer), *quantisation, *arrays].append(layer)
    return list(found.values())


def _arrays(layer: nn.Module) -> dict[str, mx.array]:
    """Weights, scales, biases: each has one row for each output."""
    return {name: value for name, value in layer.items() if isinstance(value, mx.array)}
