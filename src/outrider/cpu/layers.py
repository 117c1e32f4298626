"""Gives the layers of a loaded model the arithmetic of cpu_math, on CPUs it is meant for.

Layers get a subclass of what they are, in which the methods that call mlx-lm's `swiglu` or
`scaled_dot_product_attention` are the same code with ours in their place. Parameters stay where they are, and
no module of mlx-lm is changed: another model of the process, or this one after `restore`, computes as ever.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import FunctionType

import mlx.nn as nn
from mlx_lm.models import activations, base
from mlx_lm.models.switch_layers import SwitchGLU

from outrider.cpu import fast_math

_REPLACED: tuple[tuple[object, object], ...] = (
    (activations.swiglu, fast_math.swiglu),
    (base.scaled_dot_product_attention, fast_math.attention),
)

_STAND_INS: dict[type[nn.Module], type[nn.Module]] = {nn.RoPE: fast_math.PassRope}


def use(model: nn.Module) -> None:
    """Where it does not apply, nothing happens; what is in use already stays."""
    if fast_math.applies():
        for _, module in model.named_modules():
            if isinstance(module, SwitchGLU):  # by default all of a process share one activation
                module.activation = copy.copy(module.activation)
        for _, module in model.named_modules():
            kind: type[nn.Module] = type(module)
            module.__class__ = _fast(kind)


def restore(model: nn.Module) -> None:
    """Make every layer again what `use` found."""
    for _, module in model.named_modules():
        if _is_fast(type(module)):
            module.__class__ = type(module).__bases__[0]


@contextmanager
def off(*models: nn.Module) -> Iterator[None]:
    """mlx-lm's own arithmetic for a while, to compare with it."""
    kinds = [(module, type(module)) for model in models for _, module in model.named_modules()]
    for model in models:
        restore(model)
    try:
        yield
    finally:
        for module, kind in kinds:
            module.__class__ = kind


def _is_fast(kind: type) -> bool:
    return kind in _STAND_INS.values() or "_replaced_by_outrider" in vars(kind)


@cache
def _fast(kind: type[nn.Module]) -> type[nn.Module]:
    """The subclass that stands in for a class; the class itself where there is nothing to replace."""
    if kind in _STAND_INS:
        return _STAND_INS[kind]
    methods = {} if _is_fast(kind) else _with_ours(kind)
    if not methods:
        return kind
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), {**methods, **names, "_replaced_by_outrider": tuple(methods)})


def _with_ours(kind: type) -> dict[str, FunctionType]:
    """The methods of a class that call what is replaced, calling ours."""
    found = {}
    for name in dir(kind):
        method = getattr(kind, name)
        if isinstance(method, FunctionType) and (ours := _ours_in(method)):
            ours_called = FunctionType(
                method.__code__,
                {**method.__globals__, **ours},
                method.__name__,
                method.__defaults__,
                method.__closure__,
            )
            ours_called.__kwdefaults__, ours_called.__qualname__ = method.__kwdefaults__, method.__qualname__
            found[name] = ours_called
    return found


def _ours_in(method: FunctionType) -> dict[str, object]:
    """By the names that the method knows mlx-lm's functions by."""
    called = {name: method.__globals__.get(name) for name in method.__code__.co_names}
    return {name: ours for name, value in called.items() for theirs, ours in _REPLACED if value is theirs}
