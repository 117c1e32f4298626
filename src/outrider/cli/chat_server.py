"""`outrider chat --url`: answers from a server, through /v1/chat/completions as a stream.

Owns the connection and the reading of chunks. Speaks to any server with OpenAI's API.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from outrider.chat.conversation import Message
from outrider.chat.events import ChatEvent, Finished, ReasoningDelta, TextDelta, Usage
from outrider.cli.chat_backends import ChatFailed
from outrider.engine.sequence import Stats
from outrider.request import SamplingParams
from outrider.server_address import ServerAddress
from outrider.sse_lines import NoChunk, read_line

CONNECT_S = 10.0
SILENCE_S = 600.0  # Outrider's own streams say something every few seconds
MAX_ERROR_BYTES = 64 * 1024


@contextmanager
def ask(
    address: ServerAddress, method: str, route: str, body: object = None
) -> Iterator[http.client.HTTPResponse]:
    """The answer to a request, if it is none of refusal; the connection ends with the block."""
    kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
    connection = kind(address.host, address.port, timeout=CONNECT_S)
    try:
        try:
            connection.connect()
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            raise ChatFailed(f"cannot reach {address}: {_reason(error)}") from None
        try:
            connection.sock.settimeout(SILENCE_S)
            payload = None if body is None else json.dumps(body).encode()
            connection.request(method, address.path + route, payload, address.headers("outrider-chat"))
            response = connection.getresponse()
            if response.status != 200:
                raise ChatFailed(_refusal(response))
            yield response
        except (OSError, http.client.HTTPException) as error:
            raise ChatFailed(f"the connection to {address} broke: {_reason(error)}") from None
    finally:
        connection.close()


def first_model(address: ServerAddress) -> str:
    with ask(address, "GET", "/v1/models") as response:
        try:
            return str(json.loads(response.read())["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise ChatFailed(f"{address} names no model: is it a server with OpenAI's API?") from None


class ServerBackend:
    def __init__(self, address: ServerAddress, model: str, params: SamplingParams) -> None:
        self._address = address
        self._model = model
        self._params = params

    @property
    def greeting(self) -> str:
        return f"{self._model} at {self._address}."

    def answer(self, messages: Sequence[Message]) -> Generator[ChatEvent, None, None]:
        body = request_body(self._model, messages, self._params)
        reader = ChunkReader()
        with ask(self._address, "POST", "/v1/chat/completions", body) as response:
            if response.headers.get_content_type() != "text/event-stream":
                raise ChatFailed(f"{self._address} did not answer with a stream of events")
            for chunk in _chunks(response):
                try:
                    events = list(reader.read(chunk))
                except (AttributeError, TypeError):
                    raise ChatFailed("the server sent a chunk that is none of a chat completion") from None
                yield from events
        yield reader.finished()


def request_body(model: str, messages: Sequence[Message], params: SamplingParams) -> dict[str, Any]:
    body = {
        "model": model,
        "messages": [{"role": message.role, "content": message.text} for message in messages],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": params.temperature,
        "top_p": params.top_p,
        "max_tokens": params.max_tokens,
    }
    if params.seed is not None:
        body["seed"] = params.seed
    if params.draft_depth != "auto":  # other servers do not know it
        body["draft_depth"] = params.draft_depth
    return body


class ChunkReader:
    """The chunks of one answer as events; times are the client's."""

    def __init__(self) -> None:
        self._started_s = time.perf_counter()
        self._first_s: float | None = None
        self._last_s = self._started_s
        self._finish_reason: str | None = None
        self._usage: Mapping[str, Any] = {}

    def read(self, chunk: Mapping[str, Any]) -> Iterator[ChatEvent]:
        if chunk.get("error"):
            raise ChatFailed(_message(chunk))
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            if thought := delta.get("reasoning_content") or delta.get("reasoning"):
                yield self._timed(ReasoningDelta("" + thought))  # a TypeError where it is no text
            if text := delta.get("content"):
                yield self._timed(TextDelta("" + text))
            if choice.get("finish_reason"):
                self._finish_reason = choice["finish_reason"]
                self._last_s = time.perf_counter()

    def finished(self) -> Finished:
        if self._finish_reason is None:
            raise ChatFailed("the server hung up in the middle of its answer")
        usage = _usage(self._usage)
        stats = Stats(
            num_prompt=usage.num_prompt,
            num_generated=usage.num_generated,
            ttft_s=None if self._first_s is None else self._first_s - self._started_s,
            total_s=self._last_s - self._started_s,
        )
        return Finished("length" if self._finish_reason == "length" else "stop", usage, stats)

    def _timed(self, event: ChatEvent) -> ChatEvent:
        self._first_s = self._first_s or time.perf_counter()
        return event


def _chunks(response: http.client.HTTPResponse) -> Iterator[Mapping[str, Any]]:
    """What the stream's data lines hold, up to [DONE]; comments keep it alive and say nothing."""
    for line in response:
        try:
            chunk = read_line(line)
        except NoChunk as error:
            raise ChatFailed(str(error)) from None
        if chunk == "done":
            return
        if chunk is not None:
            yield chunk


def _usage(usage: Mapping[str, Any]) -> Usage:
    details = usage.get("completion_tokens_details") or {}
    return Usage(
        num_prompt=usage.get("prompt_tokens") or 0,
        num_generated=usage.get("completion_tokens") or 0,
        num_reasoning=details.get("reasoning_tokens") or 0,
        num_accepted=details.get("accepted_prediction_tokens") or 0,
        num_rejected=details.get("rejected_prediction_tokens") or 0,
    )


def _refusal(response: http.client.HTTPResponse) -> str:
    try:
        message = _message(json.loads(response.read(MAX_ERROR_BYTES)))
    except ValueError:
        message = response.reason
    return f"the server says {response.status}: {message}"


def _message(body: object) -> str:
    """What went wrong, in OpenAI's shape or near it."""
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
