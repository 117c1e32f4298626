"""A server that writes bytes as it is told, whatever it is asked: for what no library would send."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

Step = bytes | float  # bytes to send, or seconds to wait


@contextmanager
def raw_server(*scripts: Sequence[Step]) -> Iterator[str]:
    """Its address. The first request gets the first script, and so on; then it hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for script in scripts:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(1 << 16)
                    _play(connection, script)

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def _play(connection: socket.socket, script: Sequence[Step]) -> None:
    try:
        for step in script:
            if isinstance(step, bytes):
                connection.sendall(step)
            else:
                time.sleep(step)
    except OSError:
        pass


def head(*lines: str, status: str = "200 OK") -> bytes:
    usual = ["Content-Type: text/event-stream"] if not any("Content-Type" in line for line in lines) else []
    return "\r\n".join([f"HTTP/1.1 {status}", *usual, *lines, "", ""]).encode()


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"
