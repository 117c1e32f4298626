"""An ASGI client without a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from outrider.api.app import Server


class Caller:
    """An ASGI client that can leave, or stop reading."""

    def __init__(self, path: str, body: dict[str, Any]) -> None:
        self.status: int | None = None
        self.received = b""
        self.gone = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()
        self.on_data: Callable[[], None] = lambda: None
        self._body: bytes | None = json.dumps(body).encode()
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "scheme": "http",
            "server": ("test", 80),
            "client": ("test", 1),
        }

    async def receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await self.reads.wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.received += message["body"]
            self.on_data()

    async def call(self, made: Server) -> None:
        await made.app(self.scope, self.receive, self.send)
