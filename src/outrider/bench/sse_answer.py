"""From the chunks of a streamed chat completion to an Answer: what came when, and who counted its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.bench.answer import Answer, Arrival, TokenSource
from outrider.bench.http_stream import HttpFailed, Read
from outrider.bench.workloads import Task
from outrider.sse_lines import NoChunk, read_line

ONE_TOKEN_A_CHUNK = 0.95  # chunks a token from which on each chunk is taken for one token

Piece = tuple[float, int]  # (when it came, characters)


class AnswerReader:
    """Takes a stream as it is read; `answer` once it is over."""

    def __init__(self, task: Task, started_s: float) -> None:
        self._task = task
        self._started_s = started_s
        self._rest = b""  # of a line whose end has not come yet
        self._texts: list[str] = []
        self._pieces: list[Piece] = []
        self._num_chunks = 0
        self._usage: Mapping[str, Any] = {}
        self._finish_reason: str | None = None
        self.is_done = False

    def take(self, read: Read) -> None:
        """HttpFailed where the stream tells of an error or is none."""
        *lines, self._rest = (self._rest + read.data).split(b"\n")
        for line in lines:
            try:
                self._take_line(line, read.at_s)
            except NoChunk as error:
                raise HttpFailed(str(error)) from None
            except (AttributeError, TypeError):
                raise HttpFailed("the server sent a chunk that is none of a chat completion") from None

    def answer(self, ended_s: float) -> Answer:
        if self._finish_reason is None and not self.is_done:
            raise HttpFailed("the server hung up in the middle of its answer")
        num_tokens, source = self._num_tokens()
        return Answer(
            kind=self._task.kind,
            started_s=self._started_s,
            ended_s=ended_s,
            arrivals=arrivals(self._pieces, self._num_chunks, num_tokens, self._started_s),
            num_tokens=num_tokens,
            token_source=source,
            finish_reason=self._finish_reason,
            text="".join(self._texts),
            num_prompt=self._usage.get("prompt_tokens"),
            num_cached=(self._usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
        )

    def _num_tokens(self) -> tuple[int, TokenSource]:
        counted = self._usage.get("completion_tokens")
        if isinstance(counted, int) and counted > 0:
            return counted, "usage"
        return self._num_chunks, "chunks"

    def _take_line(self, line: bytes, at_s: float) -> None:
        chunk = None if self.is_done else read_line(line)
        if chunk == "done":
            self.is_done = True
        elif chunk is not None:
            self._take_chunk(chunk, at_s)

    def _take_chunk(self, chunk: Mapping[str, Any], at_s: float) -> None:
        if chunk.get("error"):
            raise HttpFailed(f"the server says: {error_message(chunk)}")
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
            text = delta.get("content") or ""
            if said := "" + thought + text:  # a TypeError where it is no text
                self._texts.append("" + text)
                self._pieces.append((at_s, len(said)))
                self._num_chunks += 1
            self._finish_reason = choice.get("finish_reason") or self._finish_reason


def arrivals(
    pieces: Sequence[Piece], num_chunks: int, num_tokens: int, started_s: float
) -> tuple[Arrival, ...]:
    """What came in one read is one arrival.

    An answer's tokens are known, those of a chunk are not. With about a chunk a token each chunk gets the
    same share; with fewer (a server that sends strides) the share of a chunk is that of its characters.
    """
    if not pieces:
        return ()
    is_even = num_chunks >= ONE_TOKEN_A_CHUNK * num_tokens
    total = num_chunks if is_even else sum(length for _, length in pieces)
    shares: dict[float, float] = {}
    for at_s, length in pieces:
        shares[at_s] = shares.get(at_s, 0.0) + num_tokens * (1 if is_even else length) / total
    return tuple(Arrival(at_s - started_s, share) for at_s, share in shares.items())


def error_message(body: object) -> str:
    """What went wrong, in OpenAI's shape or near it."""
    error = body.get("error", body.get("detail", body)) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)
