"""A client for any server with OpenAI's API: streamed chat completions, each chunk with its time of arrival.

Owns the connection, the limits and the error messages. Used by `outrider bench` and `outrider chat`.
"""

from __future__ import annotations

import json
import os
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from httpx_sse import EventSource

from outrider.server_address import ServerAddress

CONNECT_TIMEOUT_S = 10.0  # seconds; chosen by hand
MAX_EVENT_BYTES = 1 << 20  # of one event; chosen by hand: a chunk has a few hundred bytes
MAX_BODY_BYTES = 4 << 20  # of an answer that is not a stream; chosen by hand: /metrics has about 10 kB


class ServerError(Exception):
    """The server gave no complete answer. The message gives the reason."""


class ServerUnreachable(ServerError):
    """No connection could be made."""


@dataclass(frozen=True)
class ChatChunk:
    """One event of a streamed chat completion."""

    read_at_s: float  # time.perf_counter() when its last bytes were read; events of one read share the time
    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)


class ChatClient:
    """Every request has a connection of its own, as the requests of different users have."""

    def __init__(self, address: ServerAddress, user_agent: str, silence_s: float) -> None:
        """`silence_s`: seconds without a byte from the server after which a request fails."""
        headers = {"User-Agent": user_agent, "Accept-Encoding": "identity"}  # compression would delay tokens
        if address.api_key:
            headers["Authorization"] = f"Bearer {address.api_key}"
        self.address = address
        self._silence_s = silence_s
        self._client = httpx.AsyncClient(
            base_url=address.url,
            headers=headers,
            verify=ssl.create_default_context(),
            timeout=httpx.Timeout(silence_s, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,  # a proxy would be measured too
        )

    async def get(self, path: str) -> bytes:
        async with self._request("GET", path) as response:
            if response.status_code != 200:
                raise ServerError(await _refusal(response))
            return await _body(response)

    async def first_model(self) -> str | None:
        """None if the server lists no model."""
        try:
            return str(json.loads(await self.get("/v1/models"))["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            return None

    async def stream_chat(self, body: Mapping[str, Any]) -> AsyncGenerator[ChatChunk, None]:
        """The chunks of an answer as they arrive. Raises ServerError, also if the answer breaks off."""
        is_complete = False
        async with self._request("POST", "/v1/chat/completions", body) as response:
            if response.status_code != 200:
                raise ServerError(await _refusal(response))
            kind = response.headers.get("content-type", "").partition(";")[0].strip()
            if kind != "text/event-stream":
                raise ServerError(
                    f"the server answered with {kind or 'no type'}, not with a stream of events"
                )
            stream = _TimedStream(response)
            timed = httpx.Response(response.status_code, headers=response.headers, stream=stream)
            async for event in EventSource(timed).aiter_sse():
                stream.num_waiting = 0
                if event.data.strip() == "[DONE]":
                    return
                if event.data:
                    chunk = _chunk(event.data, stream.read_at_s)
                    is_complete = is_complete or chunk.finish_reason is not None
                    yield chunk
        if not is_complete:
            raise ServerError("the server hung up in the middle of its answer")

    @asynccontextmanager
    async def _request(self, method: str, path: str, body: object = None) -> AsyncIterator[httpx.Response]:
        try:
            async with self._client.stream(method, path, json=body) as response:
                yield response
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise ServerUnreachable(f"cannot reach {self.address}: {_reason(error)}") from None
        except httpx.TimeoutException:
            raise ServerError(f"the server was silent for {self._silence_s:g} seconds") from None
        except httpx.RemoteProtocolError as error:
            raise ServerError(f"the server hung up or does not speak HTTP: {error}") from None
        except httpx.TransportError as error:
            raise ServerError(f"the connection to {self.address} broke: {_reason(error)}") from None


class _TimedStream(httpx.AsyncByteStream):
    """Records the time of each read. Raises ServerError if an event has no end."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self.read_at_s = 0.0
        self.num_waiting = 0  # bytes since the last complete event

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for data in self._response.aiter_raw():
            self.read_at_s = time.perf_counter()
            self.num_waiting += len(data)
            if self.num_waiting > MAX_EVENT_BYTES:
                raise ServerError(f"the server sent {self.num_waiting:,} bytes without the end of an event")
            yield data


def _chunk(data: str, read_at_s: float) -> ChatChunk:
    try:
        found = json.loads(data)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ServerError("the server sent an event that is not a JSON object")
    if found.get("error"):
        raise ServerError(f"the server reports: {_error_message(found)}")
    text, reasoning, finish_reason = "", "", None
    try:
        for choice in found.get("choices") or ():
            delta = choice.get("delta") or {}
            reasoning += delta.get("reasoning_content") or delta.get("reasoning") or ""
            text += delta.get("content") or ""
            finish_reason = choice.get("finish_reason") or finish_reason
        usage = dict(found.get("usage") or {})
    except (AttributeError, TypeError, ValueError):
        raise ServerError("the server sent an event that is not a chunk of a chat completion") from None
    return ChatChunk(read_at_s, text, reasoning, finish_reason, usage)


async def _body(response: httpx.Response) -> bytes:
    body = bytearray()
    async for data in response.aiter_bytes():
        body += data
        if len(body) > MAX_BODY_BYTES:
            raise ServerError(f"the server's answer is longer than {MAX_BODY_BYTES:,} bytes")
    return bytes(body)


async def _refusal(response: httpx.Response) -> str:
    try:
        message = _error_message(json.loads(await _body(response)))
    except ValueError:
        message = response.reason_phrase or "no reason given"
    return f"the server answered {response.status_code}: {message}"


def _error_message(body: object) -> str:
    """The message of an error in OpenAI's format, or in one that is close to it."""
    error = body.get("error", body.get("detail", body)) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)


def _reason(error: BaseException) -> str:
    """The operating system's message, which httpx stores among the causes of its own error."""
    if isinstance(error, httpx.TimeoutException):
        return "no answer in time"
    reason, cause = str(error) or type(error).__name__, error.__cause__ or error.__context__
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno is not None:
            reason = os.strerror(cause.errno) if cause.errno > 0 else str(cause.strerror)
        cause = cause.__cause__ or cause.__context__
    return reason
