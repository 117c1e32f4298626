"""The engine: one thread that owns MLX and runs the engine loop, and the calls that other threads may make.

Other threads talk to the engine thread through an inbox (submit, cancel) and one outbox for each request.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import queue
import threading
import time
import traceback
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

from outrider.config import EngineConfig, InvalidConfig
from outrider.engine.adapters import AdapterConflict, AdapterRefused, UnknownAdapter
from outrider.engine.device_turns import EngineTurns
from outrider.engine.heartbeat import IDLE, Heartbeat
from outrider.engine.loop import EngineLoop, Outbox
from outrider.engine.memory_plan import MemoryUse
from outrider.engine.parts import EngineObserver, EngineParts
from outrider.engine.prefix.status import PrefixStatus
from outrider.engine.sequence import Delta
from outrider.engine.validation import RequestValidator, ValidatedRequest
from outrider.plan import AdapterInfo
from outrider.prompt_media import PromptMedia
from outrider.request import InvalidRequest, Request, SamplingParams

log = logging.getLogger(__name__)

T = TypeVar("T")

IDLE_S = 5.0  # seconds without work after which memory for further steps is given back; chosen by hand
END_S = 1.0  # seconds that the system gets to end a thread; chosen by hand
TASKS = Path("/proc/self/task")  # of Linux: an entry for each thread
PARK_S = 0.02  # seconds that the engine thread gets to begin its endless wait (see _main); chosen by hand


class EngineStopped(RuntimeError):
    """The engine is shut down and takes no more requests."""


class Engine:
    def __init__(
        self,
        config: EngineConfig,
        build: Callable[[], EngineParts],
        observer: EngineObserver | None = None,
        turns: EngineTurns | None = None,
        is_outlived: bool = False,
    ) -> None:
        """Start the thread and wait until `build` has made the parts there; its exception is raised here.

        `turns`: on the device, if engines of other models share it. `is_outlived`: the process goes on after
        this engine, so that its thread has to end with it.
        """
        self.is_outlived = is_outlived
        self._config = config
        self._observer = observer
        self._turns = turns
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # Nothing enters the inbox once stopping is set. Reentrant: the garbage collector may end an abandoned
        # stream, which cancels, on the very thread that submits.
        self._gate = threading.RLock()
        self._stopping = threading.Event()
        self._ended = threading.Event()
        self._may_end_thread = threading.Event()
        self.failure: str | None = None  # why the engine has ended, if nobody closed it
        self._ready: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, args=(build,), name="outrider-engine", daemon=True)
        try:
            self._thread.start()
            failure = self._ready.get()
        except BaseException:  # interrupted: the thread must not go on loading
            self._stopping.set()
            raise
        if failure is not None:
            self._wait_for_end()
            clear_frames(failure)
            raise failure
        atexit.register(_close_if_alive, weakref.ref(self))

    # -- for any thread ----------------------------------------------------------------------------------

    @property
    def num_steps(self) -> int:
        return self._loop.num_steps

    @property
    def heartbeat(self) -> Heartbeat:
        return self._loop.heartbeat

    def validate(
        self,
        prompt_ids: Iterable[int],
        params: SamplingParams,
        *,
        continues_prompt: bool = True,
        request_id: str | None = None,
        media: PromptMedia | None = None,
    ) -> ValidatedRequest:
        """Check a request and prepare it for `submit`. Raises InvalidRequest if it cannot be served.

        A long prompt or a new grammar takes a while: call this from a worker thread, not from an event loop.
        """
        self._refuse_if_stopped()
        ids = tuple(prompt_ids)
        media = None if media is None else media.salted(params.cache_salt)
        keys = None if media is None else tuple(media.distinct_ids(ids))
        request_id = request_id or uuid.uuid4().hex
        return self._validator.validate(Request(request_id, ids, params, continues_prompt, media, keys))

    def submit(self, validated: ValidatedRequest) -> Outbox:
        """Queue a validated request. The outbox always gets an end, whatever happens to the request."""
        outbox = Outbox()
        with self._gate:
            self._refuse_if_stopped()
            self._inbox.put(lambda: self._add(validated, outbox))
        return outbox

    def cancel(self, request_id: str, outbox: Outbox | None = None) -> None:
        """End a request: later steps run without it, and the tokens of launched steps are dropped.

        Unknown and finished ids are no error.

        `outbox`: cancel only the request with this outbox, not a later request with the same id.
        """
        with self._gate:
            if not self._stopping.is_set():
                self._inbox.put(lambda: self._loop.cancel(request_id, outbox))

    def cancel_if_waiting(self, request_id: str, outbox: Outbox) -> None:
        """End a request with the reason "queue_timeout", unless it has got a row."""
        with self._gate:
            if not self._stopping.is_set():
                self._inbox.put(lambda: self._loop.cancel_if_waiting(request_id, outbox))

    def prefix_status(self) -> PrefixStatus | None:
        """What the prefix cache holds and has done; None if the engine has none."""
        return self._loop.prefix_status

    def memory_use(self) -> MemoryUse | None:
        """What each part takes of the memory, and may take; None once the engine is shut down."""
        return None if self._stopping.is_set() else self._loop.memory_use()

    def clear_prefix_cache(self) -> int:
        """Drop all cached prefixes, in memory and on disk. Returns how many bytes of memory that freed."""
        try:
            return self._on_engine_thread(self._loop.clear_prefixes)
        except EngineStopped:
            raise
        except Exception as error:
            raise RuntimeError(f"the prefix cache could not be cleared: {error}") from error

    @property
    def adapters(self) -> Mapping[str, AdapterInfo]:
        """The loaded adapters, by name."""
        return self._adapters.loaded

    def load_adapter(self, name: str, path: str | Path) -> AdapterInfo:
        """Load a LoRA or DoRA adapter that mlx-lm has written; requests name it in `SamplingParams.adapter`.

        Raises AdapterRefused, or AdapterConflict if the name is taken. A large one takes a while to read.
        """
        self._refuse_if_stopped()
        files = self._adapters.read(str(path))
        return self._on_engine_thread(
            partial(self._loop.load_adapter, name, files), (AdapterRefused, AdapterConflict)
        )

    def unload_adapter(self, name: str) -> AdapterInfo:
        """Raises UnknownAdapter, or AdapterConflict while requests use the adapter, waiting ones included."""
        return self._on_engine_thread(
            partial(self._loop.unload_adapter, name), (UnknownAdapter, AdapterConflict)
        )

    def _on_engine_thread(self, work: Callable[[], T], refusals: tuple[type[Exception], ...] = ()) -> T:
        """Wait for the result. Every exception but the `refusals` is a fault of the engine too."""
        done: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                done.put((work(), None))
            except refusals as error:
                done.put((None, error))
            except BaseException as error:  # the caller must not wait for ever
                done.put((None, error))
                raise

        with self._gate:
            self._refuse_if_stopped()
            self._inbox.put(run)
        result, error = done.get()
        if error is not None:
            raise error
        return cast(T, result)

    def close(self) -> None:
        """Stop after the steps in flight; live requests end as cancelled."""
        with self._gate:
            self._stopping.set()
            self._inbox.put(None)
        self._wait_for_end()

    def abandon(self, reason: str) -> None:
        """End all requests with an error, although the thread may hang. The process has to end soon."""
        self.failure = self.failure or reason
        with self._gate:
            self._stopping.set()
        self._loop.end_all("error", reason)

    def _wait_for_end(self) -> None:
        self._ended.wait()
        if self.is_outlived:
            self._may_end_thread.set()
            self._thread.join()
            _wait_for_system_thread(self._thread.native_id)
        else:
            time.sleep(PARK_S)

    def _refuse_if_stopped(self) -> None:
        if self._stopping.is_set():
            raise EngineStopped("the engine is shut down")

    # -- on the engine thread ----------------------------------------------------------------------------

    def _main(self, build: Callable[[], EngineParts]) -> None:
        try:
            if self._start(build):
                self._shut_down(self._serve())
        except BaseException as error:
            log.exception("the engine did not end properly")
            self.failure = self.failure or f"the engine failed: {error}"
        finally:
            self._ended.set()
        # When a thread ends, MLX frees the thread's compiled functions and takes the interpreter's lock for
        # that. This crashes if the interpreter is ending too. So the thread waits here, unless the
        # process outlives the engine.
        self._may_end_thread.wait()

    def _start(self, build: Callable[[], EngineParts]) -> bool:
        try:
            self._loop = EngineLoop(self._config, build(), self._observer, self._turns)
            self.facts = self._loop.parts.facts
            self.budget_bytes = self._loop.parts.budget_bytes
            self.max_rows = self._loop.scheduler.max_rows
            self.reader = self._loop.parts.reader
            self._adapters = self._loop.adapters
            self._validator = self._new_validator()
        except BaseException as error:
            self.__dict__.pop("_loop", None)  # this thread never ends, and must not hold the weights
            self._ready.put(error)
            return False
        self._ready.put(None)
        return True

    def _new_validator(self) -> RequestValidator:
        longest_context, geometry = self._loop.scheduler.longest_context(), self._loop.geometry
        if longest_context < 2:  # before `parts` is a local: the traceback must not hold the weights
            raise InvalidConfig(
                f"a memory budget of {self.budget_bytes:,} bytes does not hold even one row of this model; "
                f"it needs at least {geometry.min_bytes():,}"
            )
        parts = self._loop.parts
        ids = None if self._turns is None else self._turns.sequence_ids
        return RequestValidator(
            self._config,
            parts.facts,
            longest_context,
            parts.new_text,
            parts.grammars,
            parts.token_text,
            self._loop.adapters,
            ids,
        )

    def _serve(self) -> str | None:
        """Until the engine is closed (None), or until it cannot go on (the reason).

        Besides Exceptions that `recover` cannot handle, a panic of a Rust library ends the engine: it is a
        BaseException, and the library's state is unknown.
        """
        try:
            while not self._stopping.is_set():
                try:
                    self._read_inbox()
                    self._loop.turn()
                except Exception as error:
                    self._loop.recover(error)
        except BaseException as error:
            log.exception("the engine cannot go on")
            self.failure = f"the engine failed and is shut down: {error}"
        return self.failure

    def _read_inbox(self) -> None:
        """Run all commands; if there is no other work, wait for one."""
        while not self._stopping.is_set():
            if not self._loop.has_work:
                command = self._wait_for_command()
            elif self._inbox.empty():
                return
            else:
                command = self._inbox.get()
            self._loop.heartbeat.enter("request")
            if command is not None:
                command()

    def _wait_for_command(self) -> Callable[[], None] | None:
        self._loop.before_waiting()
        with contextlib.suppress(queue.Empty):
            return self._inbox.get(timeout=IDLE_S)
        self._loop.parts.release_buffers()
        return self._inbox.get()

    def _shut_down(self, error: str | None) -> None:
        """Every request gets an end, also one that came in while the engine stopped."""
        with self._gate:
            self._stopping.set()
        while not self._inbox.empty():
            command = self._inbox.get()
            try:
                if command is not None:
                    command()
            except BaseException:
                log.exception("a command failed while the engine stopped")
        self._loop.close(error)
        self._loop.heartbeat.enter(IDLE)

    def _add(self, request: ValidatedRequest, outbox: Outbox) -> None:
        if request.id in self._loop.live:
            outbox.put(Delta(request.id, finish_reason="error", error=f"request id {request.id} is in use"))
            return
        try:
            sequence = self._validator.new_sequence(request)
        except (
            InvalidRequest
        ) as error:  # its grammar has failed, or its adapter is gone, since it was validated
            outbox.put(Delta(request.id, finish_reason="error", error=str(error), is_client_error=True))
            return
        except Exception as error:
            log.exception("request %s could not be started", request.id)
            outbox.put(Delta(request.id, finish_reason="error", error=f"{type(error).__name__}: {error}"))
            return
        self._loop.add(sequence, outbox)


def clear_frames(error: BaseException | None) -> None:
    """Who holds the exception must not hold the weights, which are locals of the functions that it left."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _wait_for_system_thread(native_id: int | None) -> None:
    """Python's thread has ended. What MLX frees at the end of the system's thread takes a moment more."""
    if not TASKS.is_dir():
        time.sleep(END_S)
        return
    give_up_s = time.monotonic() + END_S
    while (TASKS / str(native_id)).exists() and time.monotonic() < give_up_s:
        time.sleep(0.001)


def _close_if_alive(engine: weakref.ref[Engine]) -> None:
    if (alive := engine()) is not None:
        alive.close()
