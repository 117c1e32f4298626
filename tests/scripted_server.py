"""A server of OpenAI's API that answers from a script, one answer a request, and keeps what it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Reply:
    lines: Iterable[bytes]  # the body, sent one by one
    status: int = 200
    content_type: str = "text/event-stream"


@dataclass
class ScriptedServer:
    url: str
    replies: list[Reply]
    bodies: list[Any] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)


def stream(*deltas: dict[str, Any], finish: str | None = "stop", usage: Any = None) -> Reply:
    chunks: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    if finish is not None:
        chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
        chunks.append({"choices": [], "usage": usage})
    lines = [b": keep-alive\n\n", *(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks)]
    return Reply([*lines, b"data: [DONE]\n\n"] if finish else lines)


def says(text: str) -> Reply:
    return stream({"role": "assistant", "content": ""}, *({"content": character} for character in text))


def refuses(status: int, message: str) -> Reply:
    body = json.dumps({"error": {"message": message, "type": "t", "param": None, "code": None}})
    return Reply([body.encode()], status, "application/json")


@contextmanager
def scripted(
    replies: Sequence[Reply],
    models: Sequence[dict[str, Any]] = ({"id": "first"}, {"id": "second"}),
    list_reply: Reply | None = None,
) -> Iterator[ScriptedServer]:
    """`models`: what /v1/models lists; `list_reply`: what it answers instead."""
    listed = list_reply or Reply([json.dumps({"data": list(models)}).encode()], 200, "application/json")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply(listed)

        def do_POST(self) -> None:
            found.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            found.headers.append(dict(self.headers))
            self._reply(found.replies.pop(0))

        def _reply(self, reply: Reply) -> None:
            self.send_response(reply.status)
            self.send_header("Content-Type", reply.content_type)
            self.end_headers()
            try:
                for line in reply.lines:
                    self.wfile.write(line)
                    self.wfile.flush()
            except (BrokenPipeError, ConnectionResetError):
                pass

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found = ScriptedServer(f"http://127.0.0.1:{server.server_port}", list(replies))
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield found
        server.shutdown()
