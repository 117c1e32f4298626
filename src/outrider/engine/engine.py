"""The engine: one thread that owns MLX and loops plan, launch, finish, commit. It decides nothing.

Where the device is faster than the host, the step after the one under way is launched before that is read.

Other threads talk to it through an inbox (submit, cancel) and one outbox a request.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace

from outrider.config import EngineConfig, InvalidConfig
from outrider.engine.image_encoding import EncodingTurns
from outrider.engine.in_flight import Flights
from outrider.engine.outbox import Outbox
from outrider.engine.parts import EngineObserver, EngineParts
from outrider.engine.prefix.status import PrefixStatus, new_prefix_cache
from outrider.engine.scheduler import Scheduler
from outrider.engine.sequence import Delta, FinishReason, Sequence
from outrider.engine.validation import RequestValidator
from outrider.plan import StepPlan, StepResult
from outrider.prompt_media import PromptMedia
from outrider.request import Request, SamplingParams

log = logging.getLogger(__name__)

LIE_DOWN_S = 0.02  # what the thread needs, at its end, to get out of the interpreter's way: see Engine._main


class EngineStopped(RuntimeError):
    """The engine is shut down and takes no more requests."""


class Engine:
    def __init__(
        self, config: EngineConfig, build: Callable[[], EngineParts], observer: EngineObserver | None = None
    ) -> None:
        """Start the thread and wait until `build` has made the parts there; its exception is raised here."""
        self._config = config
        self._observer = observer
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._live: dict[str, tuple[Sequence, Outbox]] = {}  # engine thread only
        self._num_steps = 0
        self._turns = EncodingTurns()
        # Nothing enters the inbox once stopping is set. Reentrant: the garbage collector may end an abandoned
        # stream, which cancels, on the very thread that submits.
        self._gate = threading.RLock()
        self._stopping = threading.Event()
        self._ready: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, args=(build,), name="outrider-engine", daemon=True)
        self._ended = threading.Event()
        try:
            self._thread.start()
            failure = self._ready.get()
        except BaseException:  # interrupted: what is being loaded must not stay
            self._stopping.set()
            raise
        if failure is not None:
            self._wait_for_the_end()
            raise failure
        atexit.register(_close_if_alive, weakref.ref(self))

    # -- for any thread ----------------------------------------------------------------------------------

    @property
    def num_steps(self) -> int:
        return self._num_steps

    def check(self, prompt_ids: Iterable[int], params: SamplingParams) -> None:
        """Raise InvalidRequest if the engine would refuse this."""
        self._refuse_if_stopped()
        self._validator.validate(Request("", tuple(prompt_ids), params))

    def submit(
        self,
        prompt_ids: Iterable[int],
        params: SamplingParams,
        *,
        continues_prompt: bool = True,
        request_id: str | None = None,
        media: PromptMedia | None = None,
    ) -> tuple[str, Outbox]:
        """Queue a request. Raises InvalidRequest at once if it cannot be served; else its end will come."""
        ids = tuple(prompt_ids)
        keys = None if media is None else tuple(media.distinct_ids(ids))
        request_id = request_id or uuid.uuid4().hex
        request = Request(request_id, ids, params.with_seed(), continues_prompt, media, keys)
        outbox = Outbox()
        self._validator.validate(request)
        with self._gate:
            self._refuse_if_stopped()
            self._inbox.put(lambda: self._add(request, outbox))
        return request.id, outbox

    def cancel(self, request_id: str, outbox: Outbox | None = None) -> None:
        """Stop a request before the next step. Unknown and finished ids are no error.

        With its outbox: this very request, not another that has the id now.
        """
        with self._gate:
            if not self._stopping.is_set():
                self._inbox.put(lambda: self._cancel(request_id, outbox))

    def prefix_status(self) -> PrefixStatus | None:
        """What the prefix cache holds and has done; None when there is none."""
        return self._prefix_status

    def clear_prefix_cache(self) -> int:
        """Forget all cached prefixes, in memory and on disk; how many bytes of memory that freed."""
        done: queue.SimpleQueue[int | BaseException] = queue.SimpleQueue()

        def clear() -> None:
            try:
                done.put(self._clear_prefixes())
            except BaseException as error:  # who asked must not wait for ever
                done.put(error)
                raise

        with self._gate:
            self._refuse_if_stopped()
            self._inbox.put(clear)
        freed = done.get()
        if isinstance(freed, BaseException):
            raise RuntimeError(f"the prefix cache could not be cleared: {freed}") from freed
        return freed

    def close(self) -> None:
        """Stop after the step under way; live requests end as cancelled."""
        with self._gate:
            self._stopping.set()
            self._inbox.put(None)
        self._wait_for_the_end()

    def _wait_for_the_end(self) -> None:
        self._ended.wait()
        time.sleep(LIE_DOWN_S)

    def _refuse_if_stopped(self) -> None:
        if self._stopping.is_set():
            raise EngineStopped("the engine is shut down")

    # -- on the engine thread ----------------------------------------------------------------------------

    def _main(self, build: Callable[[], EngineParts]) -> None:
        try:
            if self._start(build):
                self._shut_down(self._serve())
        finally:
            self._ended.set()
        # MLX frees a thread's compiled functions, taking the interpreter's lock, when the thread ends: fatal
        # if the interpreter is ending too. So the thread never ends; it only lies down.
        threading.Event().wait()

    def _start(self, build: Callable[[], EngineParts]) -> bool:
        try:
            self._parts = build()
            self.facts = self._parts.facts
            self.budget_bytes = self._parts.budget_bytes
            self.reader = self._parts.reader
            self._geometry = self._parts.runner.geometry(self._config.capacity_step)
            self._scheduler = self._new_scheduler()
            self._validator = self._new_validator()
            self._flights = Flights(self._parts.runner)
        except BaseException as error:
            self.__dict__.pop("_parts", None)  # this thread stays, the weights must not
            self._ready.put(error)
            return False
        self._ready.put(None)
        return True

    def _serve(self) -> str | None:
        """Until it is closed; or why it could not go on."""
        try:
            while not self._stopping.is_set():
                self._turn()
        except BaseException as error:  # not even the cleaning up worked
            log.exception("the engine cannot go on")
            return f"the engine failed and is shut down: {error}"
        return None

    def _shut_down(self, error: str | None) -> None:
        """Everyone gets an end: who lives, and whose request came in while the engine stopped."""
        with self._gate:
            self._stopping.set()
        while not self._inbox.empty():
            command = self._inbox.get()
            try:
                if command is not None:
                    command()
            except Exception:
                log.exception("a command failed while the engine stopped")
        self._end_all("cancelled" if error is None else "error", error)
        try:
            while self._flights:  # a device must not be at work any more when the process ends
                self._flights.land()
        except Exception:
            log.exception("a step failed while the engine stopped")
        try:
            self._parts.keep_learnt()
        except Exception:
            log.exception("what was learnt about depths is lost")
        if self._parts.disk is not None:
            self._parts.disk.close()
        del self._parts, self._flights, self._scheduler  # and with them the weights

    def _new_validator(self) -> RequestValidator:
        longest = self._scheduler.longest_context()
        if longest < 2:
            raise InvalidConfig(
                f"a memory budget of {self.budget_bytes:,} bytes does not hold even one row of this model; "
                f"it needs at least {self._geometry.num_bytes(1, self._geometry.capacity_step):,}"
            )
        return RequestValidator(
            self._config, self._parts.facts, longest, self._parts.new_text, self._parts.grammars
        )

    def _new_scheduler(self) -> Scheduler:
        parts, prefix_cache = self._parts, None
        if parts.prefix_bytes:
            prefix_cache = new_prefix_cache(self._geometry, parts.prefix_bytes, parts.disk)
        self._prefix_status = None if prefix_cache is None else PrefixStatus(prefix_cache, parts.disk)
        image_embeddings = parts.runner.image_embeddings
        if image_embeddings is not None:
            image_embeddings.forget_holds()
        budget_bytes = parts.budget_bytes
        return Scheduler(
            self._config, self._geometry, budget_bytes, parts.controller, prefix_cache, image_embeddings
        )

    def _turn(self) -> None:
        try:
            self._read_inbox()
            if self._has_work:
                self._encode(is_urgent=not self._step())
        except Exception as error:  # a fault of ours, not of the model: end everyone cleanly and serve on
            log.exception("the engine failed; live requests end with an error")
            self._end_all("error", f"the engine failed: {error}")
            self._drop_everything()
            self._scheduler = self._new_scheduler()

    def _read_inbox(self) -> None:
        """Carry out all commands; when there is nothing else to do, wait for one."""
        while not self._stopping.is_set():
            is_idle = not self._has_work
            if is_idle:
                self._flights.pause()
            try:
                command = self._inbox.get(block=is_idle)
            except queue.Empty:
                return
            if command is not None:
                command()

    @property
    def _has_work(self) -> bool:
        return bool(self._flights) or not self._scheduler.is_idle

    def _step(self) -> bool:
        """Read the next step, launched now or earlier. Whether any row ran: all may wait for pictures."""
        plan = None if self._flights else self._scheduler.plan()
        if plan is None and not self._flights:
            self._flights.pause()
            if self._scheduler.next_piece() is None:
                self._scheduler.wait_for_disk()
            return False
        started_s = time.perf_counter()
        try:
            if plan is not None:
                self._flights.launch(plan)
            if self._parts.overlaps_steps and (ahead := self._scheduler.plan_overlapped()) is not None:
                self._flights.launch(ahead)
            step = self._flights.land()
        except Exception as error:
            log.exception("a step failed; its rows are computed again")
            self._drop_everything()
            deltas = self._scheduler.fail(f"the model failed: {error}")
            has_rows = True
        else:
            has_rows = bool(step.plan.batches)
            self._num_steps += has_rows
            deltas = self._scheduler.commit(step.result, step.own_s, step.host_s)
            self._turns.stepped(step.seconds)
            if has_rows:
                self._observe(step.plan, step.result, time.perf_counter() - started_s)
        for delta in deltas:
            self._deliver(delta)
        self._rest_if_idle()
        return has_rows

    def _drop_everything(self) -> None:
        """All cells are lost: a step failed half-way."""
        self._flights.drop()
        self._parts.runner.reset()
        self._parts.runner.forget_prefixes()

    def _encode(self, is_urgent: bool) -> None:
        """Between steps, one piece of a picture that a row waits for, when its turn has come."""
        piece = self._scheduler.next_piece()
        if piece is None or not (is_urgent or self._turns.may_encode(self._scheduler.num_decoding)):
            return
        started_s, encode_s = time.perf_counter(), None
        self._flights.pause()
        try:
            self._parts.runner.encode(piece)
            encode_s = time.perf_counter() - started_s
        except Exception as error:
            log.exception("a picture could not be encoded; its requests end")
            for delta in self._scheduler.fail_piece(piece, f"a picture could not be encoded: {error}"):
                self._deliver(delta)
            self._rest_if_idle()
        self._turns.encoded(time.perf_counter() - started_s)
        if encode_s is not None:
            self._tell(lambda observer: observer.on_encode(encode_s))

    def _observe(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        if plan.is_overlapped:  # rows that had ended by then ran for nothing
            there = {sequence.id for sequence, _ in self._live.values()}
            (batch,) = plan.batches
            plan = replace(plan, batches=(tuple(row for row in batch if row.sequence_id in there),))
            result = StepResult(tuple(row for row in result.rows if row.sequence_id in there))
            if not result.rows:
                return
        num_waiting, num_bytes = self._scheduler.num_waiting, self._scheduler.num_bytes
        self._tell(lambda observer: observer.on_step(plan, result, seconds, num_waiting, num_bytes))

    def _tell(self, what: Callable[[EngineObserver], None]) -> None:
        if self._observer is None:
            return
        image_embeddings = self._parts.runner.image_embeddings
        try:
            what(self._observer)
            if image_embeddings is not None:
                self._observer.on_embedding_cache(image_embeddings.num_hits, image_embeddings.num_bytes)
        except Exception:  # who only watches breaks nothing
            log.exception("the observer failed")

    def _rest_if_idle(self) -> None:
        """Nothing to do: give the memory back, but for cached prefixes, and see that the books balance."""
        runner, scheduler = self._parts.runner, self._scheduler
        if not scheduler.is_idle:
            return
        while self._flights:  # launched before its rows were seen to be finished
            try:
                scheduler.commit(self._flights.land().result)
            except Exception:
                log.exception("a step failed whose rows had all ended; cached prefixes are dropped")
                self._drop_everything()
                scheduler.fail("nobody is told")
        last_copies = scheduler.plan()
        if last_copies is not None:
            scheduler.commit(runner.finish(runner.launch(last_copies)))
        runner.reset()
        scheduler.check_integrity()
        held, accounted = runner.num_bytes + runner.prefix_bytes, scheduler.num_bytes + scheduler.prefix_bytes
        if self._live or held != accounted:
            raise RuntimeError(
                f"idle with {len(self._live)} requests, {held} bytes held, {accounted} accounted"
            )

    def _add(self, request: Request, outbox: Outbox) -> None:
        if request.id in self._live:
            outbox.put(Delta(request.id, finish_reason="error", error=f"request id {request.id} is in use"))
            return
        try:
            sequence = self._validator.new_sequence(request)
        except Exception as error:
            log.exception("request %s could not be admitted", request.id)
            outbox.put(Delta(request.id, finish_reason="error", error=f"{type(error).__name__}: {error}"))
            return
        self._live[request.id] = (sequence, outbox)
        self._scheduler.add(sequence)

    def _cancel(self, request_id: str, outbox: Outbox | None) -> None:
        sequence, live_outbox = self._live.get(request_id, (None, None))
        if sequence is None or outbox not in (None, live_outbox):
            return
        self._deliver(self._scheduler.cancel(sequence))
        self._rest_if_idle()

    def _clear_prefixes(self) -> int:
        num_bytes = self._scheduler.prefix_bytes
        self._scheduler.clear_prefix_cache()
        if self._parts.disk is not None:
            self._parts.disk.clear()
        self._rest_if_idle()
        return num_bytes

    def _deliver(self, delta: Delta) -> None:
        _, outbox = self._live[delta.request_id]
        if delta.finish_reason is not None:
            del self._live[delta.request_id]
        outbox.put(delta)

    def _end_all(self, reason: FinishReason, error: str | None) -> None:
        for request_id, (sequence, outbox) in list(self._live.items()):
            del self._live[request_id]
            outbox.put(Delta(request_id, finish_reason=reason, error=error, stats=sequence.stats()))


def _close_if_alive(engine: weakref.ref[Engine]) -> None:
    alive = engine()
    if alive is not None:
        alive.close()
