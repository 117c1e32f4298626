"""Every place where layers of a loaded mlx-lm model get another class: one ordered list.

A swap gives a module a subclass of its own class (mrope: a module that holds the old rope). Parameters stay
where they are, and mlx-lm's own modules and other models of the process do not change.

    1. recurrent layers   A state for each row, written when drafts are accepted.
                          For all models with such layers. First, since it looks for mlx-lm's own classes.
    2. mrope              Three rope positions for each token.
                          For vision families that have them. Before 4, which also swaps the rope inside.
    3. deepstack          Image features are added after the first layers.
                          For Qwen3-VL. Before 4: undoing 4 then leaves deepstack in place.
    4. CPU layers         Faster attention, swiglu and rope (cpu/fast_math.py).
                          For models that are served on Linux on x86.
    5. fused layers       Two native primitives for a decoder layer with quantised weights, which are
                          interleaved before (cpu/quantized.py).
                          For models that stay quantised on a CPU. After 4, which computes
                          the calls that the primitives do not take. (Consecutive ones become
                          one primitive: cpu/layer_runs.py, called by Trunk.prepare_for_serving.)
    6. paged attention    Attention that reads the rows' blocks where they are (models/paged_attention.py).
                          For models that are served on a GPU.
    7. flat matmuls       Quantised matmuls of all tokens of a pass at once (models/quantized_layers.py).
                          For models that are served on CUDA. Before 8, which merges such layers too.
    8. merged linear      One matmul for layers that read the same input.
                          For models that are served on a GPU. Last, since a dry run of the final layers shows
                          which of them read the same input.

    9. gap ropes          A rope position for each token, for prompts of which tokens are skipped
                          (models/gap_rope.py). If the operator allows that. Before 4, as mrope. Not applied
                          here.
   10. adapters           A linear layer adds the terms of its rows' adapters (models/adapters/terms.py).
                          For layers that a loaded adapter changes, from then on. Not applied here.

1 to 3 are needed for correct results: a Trunk and an MTP head apply them when they are made. 4 to 8 are for
speed: they are applied when a model is built for serving. Training uses mlx-lm's own arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import mlx.nn as nn

from outrider import gpu_kernels
from outrider.cpu import fast_math, fused_layers
from outrider.cpu import layers as cpu_layers
from outrider.models import machine, merged_linear, paged_attention, quantized_layers
from outrider.models.adapters import terms as adapters
from outrider.models.recurrent.layer_classes import use_row_states
from outrider.models.vision.deepstack import use_deepstack
from outrider.models.vision.mrope import MRopeSections, use_mrope


def swap_layers(
    model: nn.Module,
    mrope: MRopeSections | None = None,
    num_deepstack: int = 0,
    dry_run: Callable[[], object] | None = None,
) -> None:
    """Apply the swaps that hold for this model on this device. Layers that are swapped already stay.

    `num_deepstack`: how many of the first layers add image features. `dry_run`: given for a model that is to
    be served; builds a pass over the model without computing it.
    """
    use_row_states(model)
    if mrope is not None:
        use_mrope(model, mrope)
    if num_deepstack:
        use_deepstack(model.layers, num_deepstack)
    if dry_run is None:
        return
    if fast_math.applies():
        cpu_layers.use_fast_math(model)
    fused_layers.use_fused_layers(model)
    if gpu_kernels.is_available():
        paged_attention.use_paged_attention(model)
    if quantized_layers.applies():
        quantized_layers.use_flat_matmuls(model)
    if machine.outruns_host():
        merged_linear.merge(model, dry_run)


# Undo swaps 4 to 8, the last one first.
PLAIN_CLASSES = (
    adapters.plain_class,
    merged_linear.plain_class,
    quantized_layers.plain_class,
    paged_attention.plain_class,
    fused_layers.plain_class,
    cpu_layers.plain_class,
)


@contextmanager
def without_speed_swaps(*models: nn.Module) -> Iterator[None]:
    """mlx-lm's own arithmetic while the context is open, to compare with: swaps 4 to 8 are undone."""
    with _classes_restored(*models):
        for model in models:
            for _, module in model.named_modules():
                kind = type(module)
                for plain_class in PLAIN_CLASSES:
                    kind = plain_class(kind)
                module.__class__ = kind
        yield


@contextmanager
def with_cpu_layers(model: nn.Module) -> Iterator[None]:
    """Swap 4 while the context is open."""
    with _classes_restored(model):
        cpu_layers.use_fast_math(model)
        yield


@contextmanager
def _classes_restored(*models: nn.Module) -> Iterator[None]:
    kinds = [(module, type(module)) for model in models for _, module in model.named_modules()]
    try:
        yield
    finally:
        for module, kind in kinds:
            module.__class__ = kind
