"""Runs: consecutive fused layers of a model that are computed as one native primitive.

The first layer of a run computes all of it, and the others return what they are given. (mlx-lm's own loop
calls the layers one after the other, and the loop is not ours.) The layers of a run

    are given the very array that the layer before has returned: nothing comes between them,
    are called once in a pass (a model may go through its layers twice),
    have the same rope,
    are not divided among ranks: no sum comes between them.

A trial pass that is built and not computed shows which layers these are. Each pass checks that the layers of
a run are called in order, with the same buffers and windows. A pass that does something between layers (adds
deepstack image features, or stops early for a prompt scorer) leaves `Placement.layer_buffers` empty, and its
layers are computed one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from outrider.cache.placement import Placement
from outrider.cache.ragged_kv import LayerView, RaggedKV
from outrider.cpu import extension
from outrider.cpu.low_rank import native_terms
from outrider.cpu.native_parts import Rope

# Layers of a run, at most; chosen by hand. Every output of an MLX operation knows all others, so the cost of
# building an operation grows with the square of its outputs. With several runs the device begins earlier.
MAX_LAYERS = 10

ATTENTION_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_LINEARS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, eq=False, slots=True)
class LayerRun:
    windows: Sequence[int]  # of each layer
    rope: Rope
    first: int  # the number of the first layer's buffers among the model's
    native: Any
    linears: Sequence[tuple[nn.Module, Sequence[str]]]  # of all layers, in the order of their terms

    def compute(self, x: mx.array, place: Placement) -> mx.array:
        """The output of the last layer. The cells of all layers are written."""
        buffers = place.layer_buffers[self.first : self.first + len(self.windows)]
        # No name for the old buffers: whoever holds them makes the primitive copy them.
        h, *arrays = self.native(
            x,
            [array for kv in buffers for array in kv.arrays()],
            self.rope.of_pass(place, x.shape[1]),
            place.starts,
            place.num_fed,
            place.places,
            place.has_blocks,
            self.windows,
            *native_terms(place.adapters, *self.linears),
        )
        num_each = len(arrays) // len(buffers)
        for number, kv in enumerate(buffers):
            kv.put(arrays[number * num_each : (number + 1) * num_each])
        place.num_native += len(buffers)
        place.computed_run = self, h
        place.launch(h)  # not the buffers: MLX would hold them, and the next pass copy them
        return h

    def begins_with(self, view: LayerView, window: int | None) -> bool:
        """Whether a call of the first layer is one for the whole run."""
        buffers = view.placement.layer_buffers
        return bool(buffers) and view.kv is buffers[self.first] and window == self.windows[0]

    def has_computed(self, number: int, x: mx.array, mask: object, view: LayerView) -> bool:
        """Whether the run's first layer has computed layer `number` too. Its x is then the run's output."""
        place = view.placement
        run, out = place.computed_run
        if run is not self or number == 0:
            return False
        is_next = x is out and view.kv is place.layer_buffers[self.first + number]
        if not is_next or place.window_of(mask) != self.windows[number]:
            raise RuntimeError(
                "layers that were computed together were not called one after the other with the same masks"
            )
        return True


# -- which layers are a run ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, slots=True)
class LayerCall:
    """One call of a fused layer in a dry run."""

    layer: Any
    native: tuple[Any, Any | None]  # its primitives: attention, MLP
    rope: Rope
    kv: RaggedKV
    window: int
    x: mx.array
    out: mx.array


_noted: ContextVar[list[LayerCall] | None] = ContextVar("noted layer calls", default=None)


def note(call: LayerCall) -> None:
    """Called by every fused layer that is computed by itself."""
    if (calls := _noted.get()) is not None:
        calls.append(call)


@contextmanager
def noting() -> Iterator[list[LayerCall]]:
    token = _noted.set([])
    try:
        calls = _noted.get()
        assert calls is not None
        yield calls
    finally:
        _noted.reset(token)


def use_layer_runs(calls: Sequence[LayerCall], buffers: Sequence[object]) -> None:
    """Let the layers of each run compute it together. `buffers`: of all layers of the model."""
    numbers = {id(own): number for number, own in enumerate(buffers)}
    num_calls = Counter(id(call.layer) for call in calls)
    runs: list[list[LayerCall]] = []
    for call in calls:
        if num_calls[id(call.layer)] > 1:
            continue
        if runs and len(runs[-1]) < MAX_LAYERS and _follows(call, runs[-1][-1], numbers):
            runs[-1].append(call)
        elif call.native[1] is not None and id(call.kv) in numbers:
            runs.append([call])
    for own in runs:
        if len(own) > 1:
            run = _run(own, numbers[id(own[0].kv)])
            for number, call in enumerate(own):
                call.layer._run, call.layer._number_in_run = run, number


def _follows(call: LayerCall, before: LayerCall, numbers: dict[int, int]) -> bool:
    is_next = numbers.get(id(call.kv)) == numbers[id(before.kv)] + 1
    return is_next and call.x is before.out and call.rope is before.rope and call.native[1] is not None


def _run(calls: Sequence[LayerCall], first: int) -> LayerRun:
    parts = [
        part
        for call in calls
        for part in ((call.layer.self_attn, ATTENTION_LINEARS), (call.layer.mlp, MLP_LINEARS))
    ]
    native = extension.loaded().Layers([call.native for call in calls])
    return LayerRun([call.window for call in calls], calls[0].rope, first, native, parts)
