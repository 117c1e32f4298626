"""The engine loop: plan, launch, read, commit, over and over. Runs on the engine thread, which owns MLX.

    scheduler.plan() -> InFlightStep -> executor.launch -> executor.finish -> scheduler.commit -> outboxes

It decides nothing: the scheduler decides and the runner computes. It knows which requests are live, delivers
their deltas to their outboxes, and handles steps that fail. One step is in flight, or two where the device
outruns the host: then the second one is planned and launched before the first one is read.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from outrider.config import EngineConfig
from outrider.engine.adapters import AdapterDirectory
from outrider.engine.device_turns import DeviceTurns, EngineTurns
from outrider.engine.heartbeat import IDLE, Heartbeat, sized
from outrider.engine.in_flight import InFlightStep, StepExecutor
from outrider.engine.memory_plan import MemoryUse
from outrider.engine.parts import EngineObserver, EngineParts
from outrider.engine.prefix.cache import PrefixCache, new_prefix_cache
from outrider.engine.prefix.status import PrefixStatus
from outrider.engine.scheduler import Scheduler
from outrider.engine.sequence import Delta, FinishReason, Sequence
from outrider.plan import AdapterInfo, StepResult

log = logging.getLogger(__name__)


class Outbox:
    """The unread deltas of one request, merged into one, so that a slow client costs no memory.

    The engine thread puts. Any other thread, or an event loop, takes. A slow client delays no other client.
    """

    def __init__(self) -> None:
        self.num_tokens = 0  # of all deltas so far, read or not
        self.num_prefilled = 0  # tokens of the prompt that are computed
        self._changed = threading.Condition()
        self._unread: Delta | None = None
        self._wake: Callable[[], None] | None = None

    def put(self, delta: Delta) -> None:
        with self._changed:
            self.num_tokens += len(delta.token_ids)
            self._unread = delta if self._unread is None else self._unread.merged(delta)
            self._changed.notify_all()
            wake = self._wake
        if wake is not None:
            wake()

    def take(self, timeout_s: float | None = None) -> Delta | None:
        """Wait for a delta and take everything unread as one delta. None: nothing came in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._unread is not None, timeout_s)
            delta, self._unread = self._unread, None
            return delta

    def take_now(self) -> Delta | None:
        return self.take(timeout_s=0)

    def call_on_put(self, wake: Callable[[], None]) -> None:
        """Call `wake` from the engine thread after each put, and at once if a delta is unread already."""
        with self._changed:
            self._wake = wake
            waiting = self._unread is not None
        if waiting:
            wake()


class EncodingTurns:
    """While rows decode, work between steps gets at most half of the time: then steps get as much time."""

    def __init__(self) -> None:
        self._owed_to_steps_s = 0.0

    def may_encode(self, num_decoding: int) -> bool:
        return num_decoding == 0 or self._owed_to_steps_s <= 0

    def encoded(self, seconds: float) -> None:
        self._owed_to_steps_s = seconds

    def stepped(self, seconds: float) -> None:
        self._owed_to_steps_s -= seconds


class EngineLoop:
    def __init__(
        self,
        config: EngineConfig,
        parts: EngineParts,
        observer: EngineObserver | None,
        turns: EngineTurns | None = None,
    ) -> None:
        """`turns`: of an engine that shares the device with those of other models."""
        self.parts = parts
        self.live: dict[str, tuple[Sequence, Outbox]] = {}
        self.num_steps = 0
        self.prefix_status: PrefixStatus | None = None
        self.heartbeat = Heartbeat()
        self.adapters = AdapterDirectory(parts.adapters)
        self.geometry = parts.runner.geometry(config.capacity_step)
        self._config = replace(config, max_rows=config.max_rows or parts.max_rows)
        self._observer = observer
        self._executor = StepExecutor(parts.runner, self.heartbeat)
        self._turns = EncodingTurns()
        self._device_turns = turns or DeviceTurns().join()
        self.scheduler = self._new_scheduler()

    def _new_scheduler(self) -> Scheduler:
        parts = self.parts
        prefix_cache = new_prefix_cache(self.geometry, parts.prefix_bytes, parts.disk)
        self.prefix_status = PrefixStatus(prefix_cache) if isinstance(prefix_cache, PrefixCache) else None
        image_embeddings = parts.runner.image_embeddings
        if image_embeddings is not None:
            image_embeddings.forget_holds()
        return Scheduler(
            self._config,
            self.geometry,
            parts.budget_bytes,
            parts.controller,
            prefix_cache,
            image_embeddings,
            math.inf if parts.memory is None else parts.memory.steps,
        )

    def memory_use(self) -> MemoryUse | None:
        """What the parts of the server take of the memory. For any thread: a moment's figures."""
        runner, plan = self.parts.runner, self.parts.memory
        if plan is None:
            return None
        images = 0 if runner.image_embeddings is None else runner.image_embeddings.num_bytes
        held, adapters = sum(self.parts.held_bytes().values()), self.parts.adapters.num_bytes
        return MemoryUse(plan, self.scheduler.num_bytes, self.scheduler.prefix_bytes, images, held, adapters)

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.in_flight) or not self.scheduler.is_idle

    # -- commands ----------------------------------------------------------------------------------------

    def add(self, sequence: Sequence, outbox: Outbox) -> None:
        self.live[sequence.request.id] = (sequence, outbox)
        self.scheduler.add(sequence)

    def cancel(self, request_id: str, outbox: Outbox | None) -> None:
        sequence, live_outbox = self.live.get(request_id, (None, None))
        if sequence is None or outbox not in (None, live_outbox):
            return
        self._deliver(self.scheduler.cancel(sequence))
        self._clean_up_if_idle()

    def cancel_if_waiting(self, request_id: str, outbox: Outbox) -> None:
        """End a request that has not got a row yet."""
        sequence, live_outbox = self.live.get(request_id, (None, None))
        if sequence is None or outbox is not live_outbox or sequence.counters.started_s is not None:
            return
        self._deliver(replace(self.scheduler.cancel(sequence), finish_reason="queue_timeout"))
        self._clean_up_if_idle()

    def clear_prefixes(self) -> int:
        num_bytes = self.scheduler.prefix_bytes
        self.scheduler.clear_prefix_cache()
        if self.parts.disk is not None:
            self.parts.disk.clear()
        self._clean_up_if_idle()
        return num_bytes

    def load_adapter(self, name: str, files: Any) -> AdapterInfo:
        """`files`: what `AdapterDirectory.read` has returned. Raises AdapterRefused, AdapterConflict."""
        return self.adapters.load(self.parts.adapters, name, files)

    def unload_adapter(self, name: str) -> AdapterInfo:
        """Raises UnknownAdapter; AdapterConflict while requests use the adapter, waiting ones included."""
        info = self.adapters.find(name)
        num_users = sum(sequence.adapter is info for sequence, _ in self.live.values())
        return self.adapters.unload(self.parts.adapters, name, num_users)

    def before_waiting(self) -> None:
        """The thread is about to wait for a command."""
        self._executor.forget_last_read()
        self.heartbeat.enter(IDLE)

    # -- one turn ----------------------------------------------------------------------------------------

    def turn(self) -> None:
        """One step, and then one piece of an image or of a prompt to score, if its turn has come."""
        if not self.has_work:
            return
        if self._device_turns.take(before_waiting=lambda: self.heartbeat.enter(IDLE)):
            self._executor.forget_last_read()  # another model's step came in between
        try:
            self.heartbeat.enter("planning")
            has_run = self._step()
            self._encode(is_urgent=not has_run)
            self._score(is_urgent=not has_run)
        finally:
            self._device_turns.give_back()

    def recover(self, error: Exception) -> None:
        """A fault in the engine itself, not in the model: all live requests end, the engine goes on."""
        log.exception("the engine failed; live requests end with an error")
        self.end_all("error", f"the engine failed: {error}")
        self._drop_caches()
        self.scheduler = self._new_scheduler()

    def _step(self) -> bool:
        """Launch a step if none is in flight, launch one more if allowed, then read and commit the oldest.

        False if no row could run: all wait for images or the disk.
        """
        scheduler, in_flight = self.scheduler, self.scheduler.in_flight
        planned = None if in_flight else scheduler.plan()
        if not in_flight:
            self._executor.forget_last_read()
            if scheduler.next_piece() is None and scheduler.next_to_score() is None:
                self._device_turns.give_back()
                scheduler.wait_for_disk()
            return False
        started_s = time.perf_counter()
        try:
            if planned is not None:
                self._executor.launch(planned)
            # No step may stay on the device when another model's engine has its turn.
            overlaps = self.parts.overlaps_steps and not self._device_turns.is_contended
            if overlaps and (overlapped := scheduler.plan_overlapped()) is not None:
                self._executor.launch(overlapped, in_front=[in_flight[0]])
            step = in_flight[0]
            self._executor.finish(step)
        except Exception as error:
            log.exception("a step failed; its rows are computed again")
            self._drop_caches()
            deltas = scheduler.fail(f"the model failed: {error}")
            has_run = True
        else:
            has_run = bool(step.plan.batches)
            self.num_steps += has_run
            deltas = scheduler.commit(step)
            self._note_prompts(step)
            self._turns.stepped(step.seconds or 0.0)
            if has_run:
                self._observe(step, time.perf_counter() - started_s)
        for delta in deltas:
            self._deliver(delta)
        self._clean_up_if_idle()
        return has_run

    def _encode(self, is_urgent: bool) -> None:
        """Between steps, encode one piece of an image that a row waits for, when its turn has come."""
        piece = self.scheduler.next_piece()
        if piece is None or not (is_urgent or self._turns.may_encode(self.scheduler.num_decoding)):
            return
        started_s, encode_s = time.perf_counter(), None
        self._executor.forget_last_read()
        self.heartbeat.enter(sized("image encoding", piece.num_tokens))
        try:
            self.parts.runner.encode(piece)
            encode_s = time.perf_counter() - started_s
        except Exception as error:
            log.exception("an image could not be encoded; its requests end")
            for delta in self.scheduler.fail_piece(piece, f"an image could not be encoded: {error}"):
                self._deliver(delta)
            self._clean_up_if_idle()
        self._turns.encoded(time.perf_counter() - started_s)
        if encode_s is not None:
            self._tell(lambda observer: observer.on_encode(encode_s))

    def _score(self, is_urgent: bool) -> None:
        """Between steps, score a part of a prompt whose row waits for that, when its turn has come."""
        piece = self.scheduler.next_to_score()
        if piece is None or not (is_urgent or self._turns.may_encode(self.scheduler.num_decoding)):
            return
        started_s = time.perf_counter()
        self._executor.forget_last_read()
        self.heartbeat.enter(sized("prompt scoring", piece.num_tokens))
        try:
            self.scheduler.scored(piece, self.parts.runner.score(piece))
        except Exception:
            log.exception("a prompt could not be scored; its request ends")
            for delta in self.scheduler.fail_scoring(piece, "the prompt could not be scored"):
                self._deliver(delta)
            self._clean_up_if_idle()
        self._turns.encoded(time.perf_counter() - started_s)

    def _drop_caches(self) -> None:
        """A step failed half-way: the cells cannot be trusted."""
        self._executor.forget_last_read()
        self.parts.runner.reset()
        self.parts.runner.clear_prefixes()

    def _clean_up_if_idle(self) -> None:
        """If nothing is left to do, free the row caches and check that all bytes are accounted for."""
        runner, scheduler = self.parts.runner, self.scheduler
        if not scheduler.is_idle:
            return
        while scheduler.in_flight:  # launched before the host knew that its rows were finished
            try:
                self._executor.finish(step := scheduler.in_flight[0])
                step.cost_shape = None  # nothing is learnt from a step that no request needed
                scheduler.commit(step)
            except Exception:
                log.exception("a step failed after its rows had ended; cached prefixes are dropped")
                self._drop_caches()
                scheduler.fail("the step failed after all its requests had ended")
        last_copies = scheduler.plan()
        if last_copies is not None:
            self._executor.launch(last_copies)
            self._executor.finish(last_copies)
            scheduler.commit(last_copies)
        runner.reset()
        scheduler.check_integrity()
        held, accounted = runner.num_bytes + runner.prefix_bytes, scheduler.num_bytes + scheduler.prefix_bytes
        if self.live or held != accounted:
            raise RuntimeError(
                f"idle with {len(self.live)} requests, {held} bytes held, {accounted} accounted"
            )

    # -- clients and observers ---------------------------------------------------------------------------

    def _deliver(self, delta: Delta) -> None:
        _, outbox = self.live[delta.request_id]
        if delta.finish_reason is not None:
            del self.live[delta.request_id]
        outbox.put(delta)

    def _note_prompts(self, step: InFlightStep) -> None:
        """Tell the requests whose prompts this step has read how far they are."""
        for sequence, row in step.rows.values():
            live, outbox = self.live.get(sequence.request.id, (None, None))
            if live is not sequence or outbox is None:
                continue
            if row.start + sequence.num_skipped >= sequence.num_prompt:
                continue
            progress = sequence.prompt_progress()
            outbox.num_prefilled = progress.num_done
            if sequence.params.prompt_progress:
                outbox.put(Delta(sequence.request.id, prompt_progress=progress))

    def end_all(self, reason: FinishReason, error: str | None) -> None:
        for request_id, (sequence, outbox) in list(self.live.items()):
            del self.live[request_id]
            outbox.put(Delta(request_id, finish_reason=reason, error=error, stats=sequence.stats()))

    def _observe(self, step: InFlightStep, seconds: float) -> None:
        plan, result = step.plan, step.result
        assert result is not None
        if plan.is_overlapped:  # leave out rows that had ended by then: they ran for nothing
            live_ids = {sequence.id for sequence, _ in self.live.values()}
            (batch,) = plan.batches
            plan = replace(plan, batches=(tuple(row for row in batch if row.sequence_id in live_ids),))
            result = StepResult(tuple(row for row in result.rows if row.sequence_id in live_ids))
            if not result.rows:
                return
        num_waiting, num_bytes = self.scheduler.num_waiting, self.scheduler.num_bytes
        self._tell(lambda observer: observer.on_step(plan, result, seconds, num_waiting, num_bytes))

    def _tell(self, what: Callable[[EngineObserver], None]) -> None:
        if self._observer is None:
            return
        image_embeddings = self.parts.runner.image_embeddings
        try:
            what(self._observer)
            if image_embeddings is not None:
                self._observer.on_embedding_cache(image_embeddings.num_hits, image_embeddings.num_bytes)
        except Exception:  # an observer must not break the engine
            log.exception("the observer failed")

    # -- the end -----------------------------------------------------------------------------------------

    def close(self, error: str | None) -> None:
        """End every live request, wait for the device, and save what was measured."""
        self.end_all("cancelled" if error is None else "error", error)
        try:
            while self.scheduler.in_flight:  # the device must be idle when the process ends
                step = self.scheduler.in_flight.popleft()
                if step.launched is not None:  # else its launch failed
                    self._executor.finish(step)
        except BaseException:
            log.exception("a step failed while the engine stopped")
        try:
            self.parts.on_close(error is not None)
        except Exception:
            log.exception("the measured costs could not be saved, or other ranks not be stopped")
        if self.parts.disk is not None:
            self.parts.disk.close()
        self.parts.grammars.close()
        del self.parts, self.scheduler, self._executor  # and with them the weights
