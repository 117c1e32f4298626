"""The media child process, with a decoder that crashes and one that hangs on some data."""

from __future__ import annotations

import ctypes
import time

from outrider.isolation.child import Handler, Reply, serve
from outrider.isolation.messages import Message
from outrider.media import child


def new_handler(message: Message) -> Handler:
    handle = child.new_handler(message)

    def crash_or_handle(job: Message) -> Reply:
        if job.data.startswith(b"crash"):
            ctypes.string_at(0)
        if job.data.startswith(b"hang"):
            time.sleep(10_000)
        return handle(job)

    return crash_or_handle


if __name__ == "__main__":
    serve(new_handler)
