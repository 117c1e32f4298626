"""Runs a function on a thread with a stack of a given size, for native code that recurses over its input."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

_lock = threading.Lock()  # threading.stack_size is one setting for the whole process


def run_with_stack(num_bytes: int, work: Callable[[], T]) -> T:
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    with _lock:
        default = threading.stack_size(num_bytes)
        try:
            thread = threading.Thread(target=run, name="outrider-deep-stack", daemon=True)
            thread.start()
        finally:
            threading.stack_size(default)
    try:
        return done.result()
    finally:
        thread.join()
