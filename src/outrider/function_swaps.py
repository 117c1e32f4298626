"""Subclasses of mlx-lm's layers in which some of the functions that the layers call are replaced.

In the subclass, the methods that call such a function are the same code with another function under its name.
Parameters stay where they are and no module of mlx-lm is changed, so other models of the process keep their
arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import FunctionType

Replacement = tuple[object, object]  # a function, and the one that replaces it

_MARK = "_replaced_by_outrider"


def is_swapped(kind: type) -> bool:
    """Whether `with_functions` has made this class."""
    return _MARK in vars(kind)


@cache
def with_functions(kind: type, replacements: Sequence[Replacement]) -> type:
    """The subclass that calls the other functions; the class itself if it calls none of the replaced ones."""
    methods = {} if is_swapped(kind) else _replaced_methods(kind, replacements)
    if not methods:
        return kind
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), {**methods, **names, _MARK: tuple(methods)})


def _replaced_methods(kind: type, replacements: Sequence[Replacement]) -> dict[str, FunctionType]:
    """Copies of the methods that call replaced functions, with the new ones in their globals."""
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
            for theirs, ours in replacements
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
