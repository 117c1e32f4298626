"""Why a model of the pool cannot be used, or is not loaded."""

from __future__ import annotations


class PoolError(RuntimeError):
    """A model cannot be used. The message says which one and why."""


class UnknownModel(PoolError):
    pass


class LoadFailed(PoolError):
    pass


class ModelTooLarge(LoadFailed):
    """The model never fits into the memory, whatever is unloaded. The message has the figures."""


class PoolClosed(PoolError):
    pass


class ModelPinned(PoolError):
    pass


class LoadStopped(Exception):
    """A load has ended because nobody waits for the model any more."""
