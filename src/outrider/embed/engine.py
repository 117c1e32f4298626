"""The embedding engine: one thread that owns a pooling model and computes the passes of all requests.

A pass is computed in small parts (`PoolingModel.run`). Each part runs within a turn of the device (`turn`):
where several models share one device, the others get their turns between two parts.
"""

from __future__ import annotations

import atexit
import logging
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from outrider.embed.passes import EmbeddingJob, PassInput, PassQueue
from outrider.engine.engine import PARK_S, EngineStopped, clear_frames
from outrider.engine.heartbeat import IDLE, Heartbeat, sized
from outrider.pooling import PoolingModel, TokenInput, Vector

log = logging.getLogger(__name__)

DeviceTurn = Callable[[], AbstractContextManager[object]]  # waits until the device may be used


class NotANumber(RuntimeError):
    """The model computed a vector that has values which are no numbers."""


class EmbeddingEngine:
    def __init__(
        self, build: Callable[[], PoolingModel], turn: DeviceTurn = nullcontext, is_outlived: bool = False
    ) -> None:
        """Start the thread and wait until `build` has loaded the model there. Raises what `build` raises.

        `is_outlived`: the process goes on after this engine, so that its thread has to end with it.
        """
        self.is_outlived = is_outlived
        self.heartbeat = Heartbeat()
        self.failure: str | None = None  # why the engine has ended, if nobody closed it
        self.num_passes = 0
        self._turn = turn
        self._changed = threading.Condition()
        self._is_stopping = False
        self._ended = threading.Event()
        self._may_end_thread = threading.Event()
        self._ready: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        args = (build,)
        self._thread = threading.Thread(target=self._main, args=args, name="outrider-embedding", daemon=True)
        self._thread.start()
        if (failure := self._ready.get()) is not None:
            self._wait_for_end()
            clear_frames(failure)
            raise failure
        atexit.register(_close_if_alive, weakref.ref(self))

    # -- for any thread ----------------------------------------------------------------------------------

    def submit(self, inputs: Sequence[TokenInput]) -> EmbeddingJob:
        """Queue the inputs of one request. The job always gets a result or an exception."""
        job = EmbeddingJob(inputs)
        with self._changed:
            if self._is_stopping:
                raise EngineStopped("the embedding engine is shut down")
            self._queue.add(job)
            self._changed.notify()
        return job

    def close(self) -> None:
        """Stop after the current part; jobs that wait or run end with EngineStopped."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        self._wait_for_end()

    def _wait_for_end(self) -> None:
        self._ended.wait()
        if self.is_outlived:
            self._may_end_thread.set()
            self._thread.join()
        else:
            time.sleep(PARK_S)

    # -- on the engine's thread --------------------------------------------------------------------------

    def _main(self, build: Callable[[], PoolingModel]) -> None:
        try:
            if self._start(build):
                self._serve()
        except BaseException as error:  # a panic of a native library, for example
            log.exception("the embedding engine cannot go on")
            self.failure = f"the embedding engine failed: {error}"
        finally:
            self._shut_down()
            self._ended.set()
        self._may_end_thread.wait()  # see Engine._main: a thread that used MLX must not end with the process

    def _start(self, build: Callable[[], PoolingModel]) -> bool:
        try:
            self._model = build()
            self.facts = self._model.facts
            self._queue = PassQueue(self.facts.pass_tokens)
        except BaseException as error:
            self._ready.put(error)
            return False
        self._ready.put(None)
        return True

    def _serve(self) -> None:
        while (chosen := self._wait_for_pass()) is not None:
            try:
                self._compute(chosen)
            except Exception as error:
                log.exception("a pass over %d inputs failed; their requests end", len(chosen))
                for job, _ in chosen:
                    job.fail(error)
            except BaseException:
                self._put_back(chosen)
                raise

    def _wait_for_pass(self) -> list[PassInput] | None:
        """None: the engine is closed."""
        with self._changed:
            while not self._is_stopping:
                if chosen := self._queue.next_pass():
                    return chosen
                self.heartbeat.enter(IDLE)
                self._changed.wait()
        return None

    def _compute(self, chosen: Sequence[PassInput]) -> None:
        inputs = [job.inputs[i] for job, i in chosen]
        name = sized("embedding pass", sum(map(len, inputs)))
        parts = self._model.run(inputs)
        while True:
            if self._is_stopping or all(job.is_abandoned for job, _ in chosen):
                parts.close()
                self._put_back(chosen)
                return
            self.heartbeat.enter(IDLE)  # while it waits for its turn
            with self._turn():
                self.heartbeat.enter(name)
                try:
                    next(parts)
                except StopIteration as end:
                    vectors = end.value
                    break
        self.num_passes += 1
        for (job, i), vector in zip(chosen, vectors, strict=True):
            self._deliver(job, i, vector)

    def _put_back(self, chosen: Sequence[PassInput]) -> None:
        """The jobs of a pass that is given up, for `_shut_down`."""
        with self._changed:
            for job in {id(job): job for job, _ in chosen}.values():
                self._queue.add(job)

    def _deliver(self, job: EmbeddingJob, index: int, vector: Vector) -> None:
        if math.isfinite(float(vector.sum(dtype=float))):
            job.deliver(index, vector)
            return
        log.error("the model computed NaN or infinity for an input of %d tokens", len(job.inputs[index]))
        job.fail(NotANumber("the model computed a vector with NaN or infinity: its files may be damaged"))

    def _shut_down(self) -> None:
        with self._changed:
            self._is_stopping = True
            jobs = self._queue.drain() if hasattr(self, "_queue") else []
        for job in jobs:
            job.fail(EngineStopped(self.failure or "the embedding engine is shut down"))
        self.__dict__.pop("_model", None)  # this thread never ends, and must not hold the weights
        self.heartbeat.enter(IDLE)


def _close_if_alive(engine: weakref.ref[EmbeddingEngine]) -> None:
    """The device must be idle when the process ends."""
    if (alive := engine()) is not None:
        alive.close()
