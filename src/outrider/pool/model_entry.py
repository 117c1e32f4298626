"""One model of a pool: its names, its settings and its state.

    not_loaded -> loading -> loaded -> unloading -> not_loaded
                     ├────-> failed (the next request tries again)
                     └────-> not_loaded (all who waited for it have left)

Only `ModelPool` changes an entry, on the event loop. (A thread that loads notes its stage and progress.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Literal, NoReturn, Protocol, TypeVar

State = Literal["not_loaded", "loading", "loaded", "unloading", "failed"]
FOREVER = float("inf")


class Closable(Protocol):
    def close(self) -> None:
        """Free all memory of the model. Called on a worker thread, when nobody uses the model."""
        ...


M = TypeVar("M", bound=Closable)
M_co = TypeVar("M_co", bound=Closable, covariant=True)

# Tells the stage of a load, such as "loading the weights", and its progress (0 to 1) if that is known.
NoteStage = Callable[[str, float | None], None]


@dataclass(frozen=True)
class ModelLoad:
    """One load, for the thread that does it."""

    note: NoteStage
    check_wanted: Callable[[], None]  # raises LoadStopped; called often, and only where a load may end


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that a model takes, weights included."""

    least: int  # with the smallest caches
    wanted: int  # with caches of the usual size

    def __post_init__(self) -> None:
        assert 0 <= self.least <= self.wanted

    @property
    def enough(self) -> int:
        """With half of the usual caches: if so much is free, no other model is unloaded."""
        return (self.least + self.wanted) // 2


class ModelSource(Protocol[M_co]):
    """How one model is loaded. Both calls run on a worker thread and may take long."""

    def measure(self, load: ModelLoad) -> MemoryNeed:
        """Find the model's files, or download them, and tell how much memory the model needs."""
        ...

    def load(self, num_bytes: int | None, load: ModelLoad) -> M_co:
        """Load the model. It may take `num_bytes`, which is at least `least`; None: no limit.

        After an exception the model holds no memory.
        """
        ...


class NoSource:
    """Of a model that was loaded before the pool was made."""

    def measure(self, load: ModelLoad) -> MemoryNeed:
        raise RuntimeError("this model cannot be loaded again")

    def load(self, num_bytes: int | None, load: ModelLoad) -> NoReturn:
        raise RuntimeError("this model cannot be loaded again")


@dataclass(eq=False)
class ModelEntry(Generic[M]):
    name: str
    source: ModelSource[M]
    path: str = ""  # as the operator gave it
    aliases: tuple[str, ...] = ()  # listed beside the name
    hidden_names: tuple[str, ...] = ()  # accepted in requests, not listed
    is_pinned: bool = False  # never unloaded, except at the end
    idle_unload_s: float = FOREVER  # unloaded after so many seconds without a request
    state: State = "not_loaded"
    model: M | None = None  # while it is loaded
    stage: str | None = None  # of a load
    progress: float | None = None  # of that stage, 0 to 1; None: not known
    error: Exception | None = None  # why the last load failed
    reserved_bytes: int = 0  # from the moment its room is found until it is unloaded
    num_leases: int = 0  # requests that use the model or wait for it
    num_loads: int = 0
    last_used_s: float = 0.0  # by the pool's clock
    keep_alive_s: float = FOREVER  # of the newest request that set it, else `idle_unload_s`
    is_waiting_for_room: bool = False
    unloads_when_idle: bool = False  # an operator has asked for it
    leaving: asyncio.Event | None = None  # it makes room for another model; set when that has ended
    task: asyncio.Task[None] | None = field(default=None, repr=False)  # that loads or unloads the model
    timer: asyncio.TimerHandle | None = field(default=None, repr=False)  # unloads the model

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    @property
    def is_idle(self) -> bool:
        return self.state == "loaded" and self.num_leases == 0

    @property
    def is_wanted(self) -> bool:
        """False: a load of the model is stopped. Any thread may ask."""
        return self.num_leases > 0 or self.is_pinned

    @property
    def seconds_left(self) -> float | None:
        """Until the model is unloaded if no request comes; None: it is in use, or stays loaded."""
        return None if self.timer is None else round(max(0.0, self.timer.when() - _loop_s()), 3)

    @property
    def failure(self) -> str | None:
        return None if self.error is None else str(self.error)

    def note(self, stage: str, progress: float | None = None) -> None:
        self.stage, self.progress = stage, progress


def _loop_s() -> float:
    return asyncio.get_running_loop().time()
