"""Messages between the server and a child process: a JSON object and raw bytes. Nothing is unpickled."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

HEADER = struct.Struct(">QQ")  # bytes of the JSON object, bytes of the data
MAX_JSON_BYTES = 1 << 20  # chosen by hand: the objects have a few short fields


Buffer = bytes | bytearray | memoryview


class Message(NamedTuple):
    fields: dict[str, Any]
    data: Buffer = b""


class ConnectionEnded(ConnectionError):
    """The other side has closed the connection."""


def send(connection: socket.socket, fields: dict[str, Any], data: Sequence[Buffer] = ()) -> None:
    """`data`: the parts of the message's data, sent one after the other."""
    text = json.dumps(fields).encode()
    connection.sendall(HEADER.pack(len(text), sum(map(len, data))) + text)
    for part in data:
        connection.sendall(part)


def receive(connection: socket.socket, max_bytes: int, deadline_s: float | None = None) -> Message:
    """The next message, with at most `max_bytes` of data.

    Raises TimeoutError at `deadline_s` (by time.monotonic), ConnectionEnded, or ValueError for a message that
    is too long.
    """
    num_json, num_data = HEADER.unpack(_receive(connection, HEADER.size, deadline_s))
    if num_json > MAX_JSON_BYTES or num_data > max_bytes:
        raise ValueError(f"a message of {num_json:,} + {num_data:,} bytes is too long")
    fields = json.loads(_receive(connection, num_json, deadline_s))
    return Message(fields, _receive(connection, num_data, deadline_s))


def _receive(connection: socket.socket, num_bytes: int, deadline_s: float | None) -> bytearray:
    received = bytearray(num_bytes)
    rest = memoryview(received)
    while rest:
        if deadline_s is not None:
            connection.settimeout(max(deadline_s - time.monotonic(), 1e-3))
        num_new = connection.recv_into(rest)
        if num_new == 0:
            raise ConnectionEnded("the connection has ended")
        rest = rest[num_new:]
    return received
