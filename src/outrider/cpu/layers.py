"""Layer classes that use cpu/fast_math.py instead of mlx-lm's functions. See models/layer_swaps.py.

Each layer that calls mlx-lm's `swiglu` or `scaled_dot_product_attention` gets a subclass of its class that
calls the functions of fast_math instead (function_swaps.py).
"""

from __future__ import annotations

import copy

import mlx.nn as nn
from mlx_lm.models import activations, base
from mlx_lm.models.switch_layers import SwitchGLU

from outrider import function_swaps
from outrider.cpu import fast_math, latent_attention

_FUNCTIONS: tuple[tuple[object, object], ...] = (  # mlx-lm's function, and the one that replaces it
    (activations.swiglu, fast_math.swiglu),
    (base.scaled_dot_product_attention, fast_math.attention),
)
_CLASSES: dict[type[nn.Module], type[nn.Module]] = {nn.RoPE: fast_math.SharedAnglesRope}


def use_fast_math(model: nn.Module) -> None:
    """Swap the layers of a model; layers that are swapped already stay."""
    for _, module in model.named_modules():
        if isinstance(module, SwitchGLU):  # all SwitchGLU layers of a process share one activation by default
            module.activation = copy.copy(module.activation)
    for _, module in model.named_modules():
        kind: type[nn.Module] = type(module)
        module.__class__ = _fast_class(kind)
    for layer in latent_attention.latent_layers(model):
        layer.__class__ = latent_attention.CLASSES[type(layer)]


def plain_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The class that a layer had before `use_fast_math`."""
    return kind.__bases__[0] if _is_fast(kind) else kind


def _is_fast(kind: type) -> bool:
    own = (*_CLASSES.values(), *latent_attention.CLASSES.values())
    return kind in own or function_swaps.is_swapped(kind)


def _fast_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The subclass that uses fast_math; the class itself if it calls none of the replaced functions."""
    if kind in _CLASSES:
        return _CLASSES[kind]
    return kind if _is_fast(kind) else function_swaps.with_functions(kind, _FUNCTIONS)
