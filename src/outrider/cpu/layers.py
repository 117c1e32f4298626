"""Layer classes that use cpu/fast_math.py instead of mlx-lm's functions. See models/layer_swaps.py.

Each layer gets a subclass of its class. In the subclass, the methods that call mlx-lm's `swiglu` or
`scaled_dot_product_attention` are the same code, with the functions of fast_math under those names.
Parameters stay where they are and no module of mlx-lm is changed, so other models of the process keep their
arithmetic.
"""

from __future__ import annotations

import copy
from functools import cache
from types import FunctionType

import mlx.nn as nn
from mlx_lm.models import activations, base
from mlx_lm.models.switch_layers import SwitchGLU

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
    return kind in own or "_replaced_by_outrider" in vars(kind)


@cache
def _fast_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The subclass that uses fast_math; the class itself if it calls none of the replaced functions."""
    if kind in _CLASSES:
        return _CLASSES[kind]
    methods = {} if _is_fast(kind) else _replaced_methods(kind)
    if not methods:
        return kind
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), {**methods, **names, "_replaced_by_outrider": tuple(methods)})


def _replaced_methods(kind: type) -> dict[str, FunctionType]:
    """Copies of the methods that call mlx-lm's functions, with fast_math's in their globals."""
    found = {}
    for name in dir(kind):
        method = getattr(kind, name)
        if not isinstance(method, FunctionType):
            continue
        called = {
            global_name: method.__globals__.get(global_name) for global_name in method.__code__.co_names
        }
        replaced = {
            global_name: ours
            for global_name, value in called.items()
            for theirs, ours in _FUNCTIONS
            if value is theirs
        }
        if replaced:
            found[name] = FunctionType(
                method.__code__,
                {**method.__globals__, **replaced},
                method.__name__,
                method.__defaults__,
                method.__closure__,
            )
            found[name].__kwdefaults__ = method.__kwdefaults__
            found[name].__qualname__ = method.__qualname__
    return found
