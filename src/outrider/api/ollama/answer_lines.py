"""Answers of chat and generate: chat events as lines of JSON, or as one object.

{"message": {"content": "Hel"}, "done": false}      a piece: text, thinking, or a whole call
{"message": {"content": ""}, "done": true, ...}     the last line, with reason and figures; or an error
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from outrider.api.answers import Answers, failure_of
from outrider.api.errors import ApiError, ollama_error
from outrider.api.logprobs import TokenText, chat_logprobs
from outrider.chat.events import (
    ChatEvent,
    Finished,
    Logprobs,
    ReasoningDelta,
    TextDelta,
    ToolCallEnded,
    ToolCallStarted,
)
from outrider.chat.json_text import dumps, loads
from outrider.plan import TokenLogprobs

log = logging.getLogger(__name__)

# Line ends in Unicode that JSON does not escape: Ollama's Python client would end a line there.
LINE_ENDS = re.compile("[\u0085\u2028\u2029]")
DONE_REASONS = {"stop": "stop", "tool_calls": "stop", "length": "length"}  # Ollama has no reason for calls


@dataclass(frozen=True)
class Piece:
    """A part of an answer, or the whole of it."""

    text: str = ""
    thinking: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)


Render = Callable[[Piece], dict[str, Any]]


def chat_fields(piece: Piece) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": piece.text}
    if piece.thinking:
        message["thinking"] = piece.thinking
    if piece.calls:
        message["tool_calls"] = piece.calls
    return {"message": message}


def generate_fields(piece: Piece) -> dict[str, Any]:
    thinking = {"thinking": piece.thinking} if piece.thinking else {}
    return {"response": piece.text, **thinking}


def line(value: dict[str, Any]) -> bytes:
    text = LINE_ENDS.sub(lambda found: f"\\u{ord(found.group()):04x}", dumps(value))
    return f"{text}\n".encode()


def failure_lines(error: ApiError) -> list[bytes]:
    return [line(ollama_error(error))]


def timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, tz=UTC).isoformat().replace("+00:00", "Z")


class AnswerLines:
    """One answer. `model`: the requested name. `render`: the fields of a piece."""

    def __init__(
        self,
        model: str,
        now_s: Callable[[], float],
        render: Render,
        with_logprobs: bool = False,
    ) -> None:
        self._model = model
        self._tokens: TokenText | None = None  # of the model, once it is loaded
        self._now_s = now_s
        self._render = render
        self._with_logprobs = with_logprobs
        self._unsent: list[TokenLogprobs] = []  # they wait for the line of their text
        self._calls: dict[int, tuple[str, str]] = {}  # id and name of each call, by its index

    def empty(self, reason: str) -> dict[str, Any]:
        """The answer to a request that generates nothing."""
        return self._rendered(Piece()) | {"done": True, "done_reason": reason}

    def keep_alive(self) -> bytes:
        """An empty piece: clients parse every line as JSON, and fail on a blank one."""
        return line(self._rendered(Piece()))

    async def lines(self, answers: Answers) -> AsyncIterator[bytes]:
        self._tokens = answers.served.tokens
        async for _, event in answers.events(self._with_logprobs):
            if isinstance(event, Finished):
                error = failure_of(event)
                done = ollama_error(error) if error else self._rendered(Piece()) | _done(event, answers)
                yield line(done)
            elif piece := self._read(event):
                yield line(self._rendered(piece))

    async def whole(self, answers: Answers) -> dict[str, Any]:
        self._tokens = answers.served.tokens
        pieces: list[Piece] = []
        finished: list[Finished] = []

        def feed(_: int, event: ChatEvent) -> None:
            if isinstance(event, Finished):
                finished.append(event)
            elif piece := self._read(event):
                pieces.append(piece)

        await answers.feed_all(feed)
        whole = Piece(
            "".join(piece.text for piece in pieces),
            "".join(piece.thinking for piece in pieces),
            [call for piece in pieces for call in piece.calls],
        )
        return self._rendered(whole) | _done(finished[0], answers)

    def _read(self, event: ChatEvent) -> Piece | None:
        """The part that the client gets. A call is sent when it is whole: its arguments are an object."""
        match event:
            case TextDelta(text):
                return Piece(text=text)
            case ReasoningDelta(text):
                return Piece(thinking=text)
            case Logprobs(tokens):
                self._unsent.extend(tokens)
            case ToolCallStarted(index, call_id, name):
                self._calls[index] = call_id, name
            case ToolCallEnded(index, arguments):
                return self._call(index, arguments)
        return None

    def _call(self, index: int, arguments: str) -> Piece | None:
        """None if the JSON of the arguments is cut off, or cannot be written again, such as 1e999.

        Clients run every call that they get: without its arguments it must not be run.
        """
        call_id, name = self._calls[index]
        try:
            found = loads(arguments) if arguments else {}
        except ValueError:
            found = None
        if not isinstance(found, dict):
            log.warning("a call of %s is left out: its arguments are not complete", name)
            return None
        return Piece(calls=[{"id": call_id, "function": {"index": index, "name": name, "arguments": found}}])

    def _rendered(self, piece: Piece) -> dict[str, Any]:
        found: dict[str, Any] = {"model": self._model, "created_at": timestamp(self._now_s())}
        found |= self._render(piece) | {"done": False}
        if self._unsent and self._tokens is not None:
            tokens, self._unsent = self._unsent, []
            found["logprobs"] = chat_logprobs(tokens, self._tokens)
        return found


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _done(finished: Finished, answers: Answers) -> dict[str, Any]:
    """The reason and the figures of an answer: tokens, and times in nanoseconds.

    arrival ── load_duration ── first step ── prompt_eval_duration ── first token ── eval_duration ── end
    """
    stats, usage = finished.stats, finished.usage
    found: dict[str, Any] = {
        "done": True,
        "done_reason": DONE_REASONS[finished.reason],
        "total_duration": nanoseconds(time.perf_counter() - answers.arrived_s),
        "prompt_eval_count": usage.num_prompt,
        "eval_count": usage.num_generated,
    }
    if stats.submitted_s is not None and stats.queue_s is not None:
        found["load_duration"] = nanoseconds(stats.submitted_s + stats.queue_s - answers.arrived_s)
        if stats.ttft_s is not None and stats.total_s is not None:
            found["prompt_eval_duration"] = nanoseconds(stats.ttft_s - stats.queue_s)
            found["eval_duration"] = nanoseconds(stats.total_s - stats.ttft_s)
    return found
