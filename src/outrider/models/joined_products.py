"""Products of one input with several layers' weights, computed as one: queries, keys, values; gate and up.

With a few tokens, a product takes a GPU little longer than its launch, so fewer products make faster steps.
Which layers read the same input is seen in a pass that is never computed. Their weights are laid one after
the other in one array, of which each layer's own become a view: names, shapes, values and bytes of a model's
parameters stay what they were. The layers become subclasses of what they are; the first that is called
computes for all. `apart` makes them what they were for a while. mlx-lm's modules stay as they are.
"""

from __future__ import annotations

import copy
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from outrider.models.heads import LoadedHead, head_layout
from outrider.models.trunk import Trunk

ROWS_STEP = 8  # every part of a product begins at a multiple, as GPUs like their vectors aligned


class _Parts(NamedTuple):
    """What is left of a product that some layers have had their part of."""

    of: weakref.ref[mx.array]
    by_number: dict[int, mx.array]


class Product:
    """The weights of several layers as one, and the parts of the last product that are still to be fetched.

    A part is let go when it is fetched, what is left when the input goes. Another input, or a part asked for
    twice, is computed anew: layers may be called in any order, by several threads, and not all of them. An
    input must not be changed in place between two of them: an array that is, is still the same one.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        """Takes over the weights of the layers, and leaves them views."""
        names = list(_arrays(layers[0]))
        self._whole = copy.copy(layers[0])
        self._ends = list(accumulate(layer.weight.shape[0] for layer in layers))[:-1]
        self._parts: _Parts | None = None
        for name in names:
            whole = mx.concatenate([layer[name] for layer in layers])
            mx.eval(whole)
            views = mx.split(whole, self._ends)
            mx.eval(views)
            self._whole[name] = whole
            for layer, view in zip(layers, views, strict=True):
                layer[name] = view
        for number, layer in enumerate(layers):
            layer.product, layer.number = self, number
            layer.__class__ = _JOINED[type(layer)]

    def part(self, number: int, x: mx.array) -> mx.array:
        parts = self._parts
        if parts is None or parts.of() is not x or number not in parts.by_number:
            found = mx.split(self._whole(x), self._ends, axis=-1)
            parts = self._parts = _Parts(weakref.ref(x, self._forget), dict(enumerate(found)))
        return parts.by_number.pop(number)

    def _forget(self, of: weakref.ref[mx.array]) -> None:
        if self._parts is not None and self._parts.of is of:
            self._parts = None


class _Joined:
    product: Product
    number: int

    def __call__(self, x: mx.array) -> mx.array:
        return self.product.part(self.number, x)


class JoinedLinear(_Joined, nn.Linear):
    pass


class JoinedQuantizedLinear(_Joined, nn.QuantizedLinear):
    pass


_JOINED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: JoinedLinear,
    nn.QuantizedLinear: JoinedQuantizedLinear,
}


def join(trunk: Trunk, head: LoadedHead | None = None) -> None:
    """Join what can be joined. For models that are served: weights must not be changed afterwards."""
    _join_in(trunk.model, trunk.pass_over_nothing)
    for layer in head.layers if head is not None else ():
        _join_in(layer, partial(head_layout, layer, trunk))


@contextmanager
def apart(*models: nn.Module) -> Iterator[None]:
    """Each layer computes for itself for a while, as in mlx-lm: to compare with it."""
    modules = [module for model in models for _, module in model.named_modules()]
    joined = [(module, type(module)) for module in modules if type(module) in _JOINED.values()]
    for module, kind in joined:
        module.__class__ = next(plain for plain, own in _JOINED.items() if own is kind)
    try:
        yield
    finally:
        for module, kind in joined:
            module.__class__ = kind


def _join_in(model: nn.Module, run: Callable[[], object]) -> None:
    for layers in _reading_the_same(model, run):
        for alike in _by_kind(layers):
            if len(alike) > 1:
                Product(alike)
                mx.clear_cache()  # no more than one product's weights are ever there twice


def _reading_the_same(model: nn.Module, run: Callable[[], object]) -> list[list[nn.Module]]:
    """The layers of a model, those together that a pass calls on the very same arrays."""
    layers = _linear_layers(model)
    found: dict[Hashable, list[nn.Module]] = defaultdict(list)
    with _watched(layers.values()) as inputs:
        run()
        for layer_id, read in inputs.items():
            found[tuple(id(x) for x in read)].append(layers[layer_id])
    return list(found.values())


@contextmanager
def _watched(layers: Iterable[nn.Module]) -> Iterator[dict[int, list[mx.array]]]:
    """What each layer, by its id, is called on. Let go at the end, with the weights that led to it."""
    inputs: dict[int, list[mx.array]] = defaultdict(list)

    def watching(kind: type[nn.Module]) -> type[nn.Module]:
        def call(self: nn.Module, x: mx.array) -> mx.array:
            inputs[id(self)].append(x)
            return kind.__call__(self, x)

        return type(kind.__name__, (kind,), {"__call__": call})

    watched = [(layer, type(layer)) for layer in layers]
    kinds = {kind: watching(kind) for kind in _JOINED}
    for layer, kind in watched:
        layer.__class__ = kinds[kind]
    try:
        yield inputs
    finally:
        inputs.clear()
        for layer, kind in watched:
            layer.__class__ = kind


def _linear_layers(model: nn.Module) -> dict[int, nn.Module]:
    """By their ids. Other kinds have something of their own to do: adapters, layers spread over machines."""
    return {id(module): module for _, module in model.named_modules() if type(module) in _JOINED}


def _by_kind(layers: Iterable[nn.Module]) -> list[list[nn.Module]]:
    """Only such weights can be laid one after the other."""
    found: dict[Hashable, list[nn.Module]] = defaultdict(list)
    for layer in layers:
        if layer.weight.shape[0] % ROWS_STEP == 0:
            arrays = [(name, one.shape[1:], one.dtype) for name, one in sorted(_arrays(layer).items())]
            how = [getattr(layer, name, None) for name in ("bits", "group_size", "mode")]
            found[type(layer), *how, *arrays].append(layer)
    return list(found.values())


def _arrays(layer: nn.Module) -> dict[str, mx.array]:
    """Weights, scales, biases: all have a row for each output."""
    return {name: value for name, value in layer.items() if isinstance(value, mx.array)}
