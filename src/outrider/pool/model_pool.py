"""Which models of a server are loaded, who uses them, and which one makes room for another.

    entry = pool.find(name)                 # UnknownModel if no model has this name
    lease = await pool.lease(entry)         # waits while the model is loaded; LoadFailed, ModelTooLarge
    ...  lease.model  ...                   # it stays loaded
    lease.release()

Requests for the same model share one load; one model is loaded at a time. If there is not enough room, the
idle model that was used least recently is unloaded; if all are in use, the load waits. A load that nobody
waits for any more is stopped. A model with a lease is never unloaded. Used from the event loop only: files
are read, and models built and closed, on threads.
Must not know what a model is: a ModelSource makes one, and `close` ends it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from outrider.pool.errors import (
    LoadFailed,
    LoadStopped,
    ModelPinned,
    ModelTooLarge,
    PoolClosed,
    PoolError,
    UnknownModel,
)
from outrider.pool.model_entry import FOREVER, M, MemoryNeed, ModelEntry, ModelLoad

log = logging.getLogger(__name__)

NUM_THREADS = 4  # that find, download and load models; chosen by hand

T = TypeVar("T")


class Lease(Generic[M]):
    """One use of a loaded model. It stays loaded until `release`."""

    def __init__(self, model: M, release: Callable[[], None]) -> None:
        self.model = model
        self._release: Callable[[], None] | None = release

    def release(self) -> None:
        """A second call has no effect."""
        release, self._release = self._release, None
        if release is not None:
            release()

    def __enter__(self) -> M:
        return self.model

    def __exit__(self, *_: object) -> None:
        self.release()


class ModelPool(Generic[M]):
    def __init__(
        self,
        entries: Iterable[ModelEntry[M]],
        limit_bytes: int | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """The first entry is the default. `limit_bytes`: of all models together; None: no limit."""
        self.entries = tuple(entries)
        self.limit_bytes = limit_bytes
        self._now_s = now_s
        self._by_name: dict[str, ModelEntry[M]] = {}
        for entry in self.entries:
            for name in entry.names:
                if self._by_name.setdefault(name, entry) is not entry:
                    raise ValueError(f"two models have the name {name!r}")
        for entry in self.entries:
            for name in entry.hidden_names:
                self._by_name.setdefault(name, entry)
        self._one_load = asyncio.Lock()
        self._changed = asyncio.Event()  # set when room may have become free
        self._is_closed = False
        self._tasks: set[asyncio.Task[None]] = set()  # held here: the event loop holds tasks weakly
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="outrider-pool")

    # -- what there is -----------------------------------------------------------------------------------

    def find(self, name: str | None) -> ModelEntry[M]:
        """The model of this name or alias; the default without a name. Raises UnknownModel."""
        if name is None:
            return self.default
        entry = self._by_name.get(name)
        if entry is None:
            known = ", ".join(repr(one.name) for one in self.entries)
            raise UnknownModel(f"the model {name[:200]!r} does not exist on this server. It serves {known}.")
        return entry

    @property
    def default(self) -> ModelEntry[M]:
        return self.entries[0]

    @property
    def loaded(self) -> list[ModelEntry[M]]:
        return [entry for entry in self.entries if entry.model is not None]

    @property
    def reserved_bytes(self) -> int:
        return sum(entry.reserved_bytes for entry in self.entries)

    # -- before the event loop runs ----------------------------------------------------------------------

    def load_now(self, entry: ModelEntry[M]) -> None:
        """Load a model on this thread. Raises what its source raises, and ModelTooLarge."""
        load = ModelLoad(entry.note, check_wanted=lambda: None)
        need = entry.source.measure(load)
        num_bytes = None
        entry.reserved_bytes = need.wanted
        if self.limit_bytes is not None:
            entry.reserved_bytes = 0
            self._check_fits(entry, need)
            num_bytes = entry.reserved_bytes = min(need.wanted, self.limit_bytes - self.reserved_bytes)
        entry.model = entry.source.load(num_bytes, load)
        entry.state, entry.keep_alive_s, entry.num_loads = "loaded", entry.idle_unload_s, 1
        entry.stage = entry.progress = None

    def begin(self) -> None:
        """The event loop runs: the time of models that are loaded and idle begins."""
        for entry in self.loaded:
            if entry.is_idle:
                self._when_idle(entry)

    # -- use ---------------------------------------------------------------------------------------------

    async def lease(self, entry: ModelEntry[M], keep_alive_s: float | None = None) -> Lease[M]:
        """Wait until the model is loaded, and keep it so.

        `keep_alive_s`: how long the model stays loaded after its last use, from now on; None: as before.
        Raises LoadFailed, which may be a ModelTooLarge, and PoolClosed during a shutdown.
        """
        while entry.leaving is not None:  # its running requests end, then another model takes its room
            await entry.leaving.wait()
        entry.num_leases += 1
        _stop_timer(entry)
        try:
            while (model := entry.model) is None:
                await self._wait_for_load(entry)
        except BaseException:
            self._give_back(entry)
            raise
        if keep_alive_s is not None:
            entry.keep_alive_s = keep_alive_s
        entry.last_used_s = self._now_s()
        return Lease(model, lambda: self._give_back(entry))

    async def load(self, entry: ModelEntry[M]) -> None:
        """Load a model for the operator: also if the caller is cancelled. Raises what `lease` raises."""
        loading = self._in_task(self._load_for_operator(entry))
        loading.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody else may ask
        await asyncio.wait({loading})
        loading.result()

    async def _load_for_operator(self, entry: ModelEntry[M]) -> None:
        (await self.lease(entry)).release()

    async def unload(self, entry: ModelEntry[M]) -> None:
        """Unload an idle model now. A model in use is unloaded after its last request. Raises ModelPinned."""
        if entry.is_pinned:
            raise ModelPinned(
                f"the model {entry.name!r} stays loaded: it is pinned (--pin), or runs on several ranks"
            )
        if entry.num_leases or entry.state == "loading":
            entry.unloads_when_idle = True
        elif entry.is_idle:
            await self._unload(entry)

    async def close(self) -> None:
        """Close all models. A load that runs is stopped where it may end; its thread is waited for."""
        self._is_closed = True
        self._changed.set()
        for entry in self.entries:
            _stop_timer(entry)
        while self._tasks:
            await asyncio.wait(self._tasks)
        for entry in self.loaded:
            await self._close_model(entry, _taken_out(entry))
        self._threads.shutdown(wait=False)

    def _give_back(self, entry: ModelEntry[M]) -> None:
        entry.num_leases -= 1
        entry.last_used_s = self._now_s()
        if entry.num_leases:
            return
        self._changed.set()
        if entry.state == "loaded":
            self._when_idle(entry)
        elif entry.is_waiting_for_room and entry.task is not None and not entry.is_wanted:
            entry.task.cancel()  # a load that has its room is stopped by `_check_wanted`

    def _when_idle(self, entry: ModelEntry[M]) -> None:
        """Unload the model, now or after its time, if no request comes."""
        keep_s = 0.0 if entry.unloads_when_idle else entry.keep_alive_s
        if entry.is_pinned or self._is_closed or entry.leaving is not None or keep_s == FOREVER:
            return
        entry.timer = asyncio.get_running_loop().call_later(keep_s, self._on_expired, entry)

    def _on_expired(self, entry: ModelEntry[M]) -> None:
        _stop_timer(entry)
        if entry.is_idle and entry.task is None:
            log.info("%s is unloaded: no request came", entry.name)
            self._start_unloading(entry)

    # -- loading -----------------------------------------------------------------------------------------

    async def _wait_for_load(self, entry: ModelEntry[M]) -> None:
        """Wait for the task that loads or unloads the model; start to load if there is none.

        Raises the error of a load that has failed. The load goes on as long as one client waits for it.
        """
        if self._is_closed:
            raise PoolClosed("the server is shutting down")
        is_load = entry.state != "unloading"
        if entry.task is None:
            entry.state, entry.error = "loading", None
            self._start(entry, self._load(entry))
        assert entry.task is not None
        await asyncio.wait({entry.task})
        if is_load and entry.error is not None:
            raise entry.error

    async def _load(self, entry: ModelEntry[M]) -> None:
        reason = None
        load = ModelLoad(entry.note, lambda: self._check_wanted(entry))
        try:
            need = await self._on_thread(entry.source.measure, load)
            load.check_wanted()
            entry.note("waiting for memory")
            entry.is_waiting_for_room = True
            async with self._one_load:
                entry.reserved_bytes = await self._make_room(entry, need)
                entry.is_waiting_for_room = False
                entry.note("loading")
                num_bytes = None if self.limit_bytes is None else entry.reserved_bytes
                entry.model = await self._on_thread(entry.source.load, num_bytes, load)
            entry.state, entry.keep_alive_s = "loaded", entry.idle_unload_s
            entry.num_loads += 1
        except LoadStopped:
            log.info("%s: its load is stopped: nobody waits for it any more", entry.name)
        except PoolError as error:
            entry.state, entry.error = "failed", error
        except Exception as error:
            reason = str(error)
            log.warning("%s could not be loaded: %s", entry.name, reason)
            log.debug("the load failed", exc_info=True)
        finally:
            if reason is not None:  # the exception itself is not kept: it may hold the weights
                entry.state = "failed"
                entry.error = LoadFailed(f"the model {entry.name!r} could not be loaded: {reason}")
            if entry.model is None:
                entry.reserved_bytes = 0
                entry.unloads_when_idle = False
                entry.state = "not_loaded" if entry.state == "loading" else entry.state
            entry.is_waiting_for_room = False
            entry.stage = entry.progress = entry.task = None
            self._changed.set()
        if entry.is_idle:  # all who waited for it have left
            self._when_idle(entry)

    def _check_wanted(self, entry: ModelEntry[M]) -> None:
        """On the thread that loads the model, or on the event loop."""
        if self._is_closed or not entry.is_wanted:
            raise LoadStopped

    async def _make_room(self, entry: ModelEntry[M], need: MemoryNeed) -> int:
        """How many bytes the model may take. Unloads idle models, and waits for those in use."""
        if self.limit_bytes is None:
            return need.wanted
        try:
            while True:
                if self._is_closed:
                    raise PoolClosed("the server is shutting down")
                self._check_fits(entry, need)
                free = self.limit_bytes - self.reserved_bytes
                if free >= need.enough:
                    return min(free, need.wanted)
                self._changed.clear()
                if any(one.state == "unloading" for one in self.entries):
                    await self._changed.wait()
                    continue
                victim = self._next_to_unload()
                if victim is not None and victim.is_idle:
                    log.info("%s is unloaded: %s needs its room", victim.name, entry.name)
                    await self._unload(victim)
                elif free >= need.least:
                    return free
                else:
                    if victim is not None and victim.leaving is None:
                        victim.leaving = asyncio.Event()
                    await self._changed.wait()
        finally:
            for one in self.entries:
                if one.leaving is not None:
                    _stay(one)
                    if one.is_idle and one.task is None:
                        self._when_idle(one)

    def _check_fits(self, entry: ModelEntry[M], need: MemoryNeed) -> None:
        assert self.limit_bytes is not None
        pinned = sum(one.reserved_bytes for one in self.entries if one.is_pinned and one is not entry)
        if need.least > self.limit_bytes - pinned:
            held = f", of which pinned models hold {_gb(pinned)}" if pinned else ""
            raise ModelTooLarge(
                f"the model {entry.name!r} does not fit: it needs at least {_gb(need.least)} for its weights "
                f"and small caches, and all models together may take {_gb(self.limit_bytes)}{held} "
                "(--memory-limit)"
            )

    def _next_to_unload(self) -> ModelEntry[M] | None:
        """The idle model that was used least recently; if there is none, the one in use that was."""
        loaded = [one for one in self.entries if one.state == "loaded" and not one.is_pinned]
        return min(
            loaded,
            key=lambda one: (
                not one.is_idle,
                one.leaving is None,  # one that takes no new requests already
                one.keep_alive_s == FOREVER,
                one.last_used_s,
            ),
            default=None,
        )

    # -- unloading ---------------------------------------------------------------------------------------

    async def _unload(self, entry: ModelEntry[M]) -> None:
        if entry.task is None:
            self._start_unloading(entry)
        assert entry.task is not None
        await asyncio.wait({entry.task})

    def _start_unloading(self, entry: ModelEntry[M]) -> None:
        assert entry.is_idle
        _stop_timer(entry)
        self._start(entry, self._close_model(entry, _taken_out(entry)))

    async def _close_model(self, entry: ModelEntry[M], model: M) -> None:
        try:
            await asyncio.to_thread(model.close)
        except Exception:
            log.exception("%s did not end properly", entry.name)
        finally:
            del model  # before its room is given to another one
            entry.state, entry.reserved_bytes, entry.task = "not_loaded", 0, None
            entry.unloads_when_idle = False
            _stay(entry)
            self._changed.set()

    def _start(self, entry: ModelEntry[M], work: Coroutine[Any, Any, None]) -> None:
        entry.task = self._in_task(work)

    def _in_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _on_thread(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)


def _taken_out(entry: ModelEntry[M]) -> M:
    """The entry's model, which no request gets from now on."""
    model, entry.model, entry.state = entry.model, None, "unloading"
    assert model is not None
    return model


def _stop_timer(entry: ModelEntry[Any]) -> None:
    if entry.timer is not None:
        entry.timer.cancel()
        entry.timer = None


def _stay(entry: ModelEntry[Any]) -> None:
    """The model does not make room any more: let in those who wait for it."""
    if entry.leaving is not None:
        entry.leaving.set()
        entry.leaving = None


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
