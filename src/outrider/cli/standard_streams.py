"""The standard streams of a server, which lives longer than the program that reads its output."""

from __future__ import annotations

import io
import os
import sys
from typing import Any


class _Unread(io.FileIO):
    """Drops what cannot be written."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:  # the reader of a pipe is gone, or a disk is full
            return len(memoryview(data).cast("B"))


def keep_standard_streams() -> None:
    """Printing goes on if nobody reads it any more. Descriptors 0 to 2 are opened if they are closed, so that
    no socket gets one of these numbers: a new worker would print into it.
    """
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(handle, True)
    os.close(handle)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and stream is getattr(sys, f"__{name}__"):
            stream.flush()
            raw = io.BufferedWriter(_Unread(stream.fileno(), "w", closefd=False))
            setattr(sys, name, io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=True))
