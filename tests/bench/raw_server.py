"""A server that sends the bytes of a script, whatever the request is; also bytes that no library sends."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

Step = bytes | float | Callable[[], object]  # bytes to send, seconds to wait, or a function to call


@contextmanager
def raw_server(*scripts: Sequence[Step]) -> Iterator[str]:
    """Yields its address. The first request gets the first script, and so on; then the server hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for script in scripts:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    _read_request(connection)
                    _play(connection, script)

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def _read_request(connection: socket.socket) -> None:
    """All of it: closing a connection with unread bytes would destroy the answer on its way."""
    data = b""
    while b"\r\n\r\n" not in data and (more := connection.recv(1 << 16)):
        data += more
    headers, _, body = data.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", headers, re.IGNORECASE)
    left = int(length[1]) - len(body) if length else 0
    while left > 0 and (more := connection.recv(left)):
        left -= len(more)


def _play(connection: socket.socket, script: Sequence[Step]) -> None:
    try:
        for step in script:
            if isinstance(step, bytes):
                connection.sendall(step)
            elif callable(step):
                step()
            else:
                time.sleep(step)
    except OSError:
        pass


def head(*lines: str, status: str = "200 OK") -> bytes:
    usual = ["Content-Type: text/event-stream"] if not any("Content-Type" in line for line in lines) else []
    return "\r\n".join([f"HTTP/1.1 {status}", *usual, *lines, "", ""]).encode()


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"
