"""One server that is measured: its process, which is started again after a crash, and its client."""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path

from benchmarks.server_process import DidNotStart, Peer, RunningServer, started, wait_until_healthy
from outrider.bench.answer import Answer
from outrider.bench.http_target import NO_FILTERS, request_body
from outrider.bench.streamed_answer import read_answer
from outrider.bench.target import RequestOptions
from outrider.bench.workloads import Task
from outrider.chat_client import ChatChunk, ChatClient, ServerError
from outrider.server_address import ServerAddress

EXCEPTION = re.compile(r"\s*[\w.]*(Error|Exception|Unavailable)\b")
END_S = 2.0  # for a process that has closed its connections
MAX_RESTARTS = 3  # after which a server is given up


class MeasuredServer:
    def __init__(self, peer: Peer, has_mtp: bool, model: str, logs: Path, timeout_s: float) -> None:
        """`model`: the name in the requests. `timeout_s`: seconds for one answer."""
        self.has_mtp = has_mtp
        self._peer, self._model, self._logs, self._timeout_s = peer, model, logs, timeout_s
        self._num_restarts = 0
        self._stack = contextlib.ExitStack()
        self._running: RunningServer | None = None
        self._client: ChatClient | None = None

    @property
    def name(self) -> str:
        return self._peer.name

    def has_crashed(self, after_errors: bool) -> bool:
        """Whether the process has ended. A process that closes its connections may take a moment to end."""
        if self._running is None:
            return True
        try:
            self._running.process.wait(END_S if after_errors else 0)
        except subprocess.TimeoutExpired:
            return False
        return True

    @property
    def port(self) -> int:
        assert self._running is not None
        return self._running.port

    def start(self) -> None:
        """Does not wait until the server is ready."""
        self._running = self._stack.enter_context(started(self._peer, self._logs))
        address = ServerAddress.parse(f"http://127.0.0.1:{self._running.port}")
        self._client = ChatClient(address, "outrider-bench", self._timeout_s)

    def wait(self) -> None:
        assert self._running is not None
        wait_until_healthy(self._running)

    def stop(self) -> None:
        self._stack.close()

    def restart(self) -> None:
        """DidNotStart: it does not start again, or has been restarted too often."""
        if self._num_restarts >= MAX_RESTARTS:
            raise DidNotStart(f"{self.name}: given up after {MAX_RESTARTS} restarts. {self.last_words()}")
        self._num_restarts += 1
        self.stop()
        self.start()
        self.wait()

    def last_words(self) -> str:
        """The last line of the log that names an exception, or the last line."""
        lines = self._running.log_tail.strip().splitlines() if self._running is not None else []
        named = [line for line in lines if EXCEPTION.match(line)]
        return (named or lines or ["The log is empty."])[-1].strip()

    async def ask(self, task: Task, on_text: Callable[[], None], max_tokens: int) -> Answer:
        """Greedy. Raises nothing: an error is part of the answer."""
        assert self._client is not None
        body = request_body(self._model, task, RequestOptions(0.0, max_tokens, 0, None))
        if self._peer.is_outrider:  # no prefix cache may answer for the model
            body |= NO_FILTERS | {"cache_salt": uuid.uuid4().hex}
        started_s = time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout_s), aclosing(self._client.stream_chat(body)) as chunks:
                return await read_answer(task, started_s, _noted(chunks, on_text))
        except ServerError as error:
            message = str(error)
        except TimeoutError:
            message = f"no complete answer within {self._timeout_s:g} s"
        return Answer(task.kind, started_s, time.perf_counter(), error=message)


async def _noted(chunks: AsyncIterator[ChatChunk], on_text: Callable[[], None]) -> AsyncIterator[ChatChunk]:
    async for chunk in chunks:
        if chunk.text or chunk.reasoning:
            on_text()
        yield chunk
