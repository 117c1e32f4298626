"""A progress bar for weights that are being loaded: memory that MLX holds, of the bytes in the files."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx

from outrider.progress import Progress, ProgressBar

POLL_S = 0.1  # seconds between two looks at MLX's memory; chosen by hand


@contextmanager
def watch_loaded_bytes(show: Callable[[int], None]) -> Iterator[None]:
    """Calls `show` again and again with the memory that MLX has taken since the body began to run."""
    is_done, bytes_before = threading.Event(), mx.get_active_memory()

    def poll() -> None:
        while not is_done.wait(POLL_S):
            show(max(0, mx.get_active_memory() - bytes_before))

    thread = threading.Thread(target=poll, name="outrider-loading", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()


@contextmanager
def loading_bar(folder: Path, name: str) -> Iterator[Callable[[str], None]]:
    """Draws the bar while the body runs. The engine's thread does the loading itself.

    Gives a function that completes the bar and prints a line: what is done after the loading.
    """
    total_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    bar, is_done = ProgressBar(), threading.Event()
    bytes_before = mx.get_active_memory()

    def show(num_bytes: int) -> None:
        bar(Progress(f"Loading {name}", min(num_bytes, total_bytes), total_bytes))

    def poll() -> None:
        while not is_done.wait(POLL_S):
            show(max(0, mx.get_active_memory() - bytes_before))

    def finish() -> None:
        is_done.set()
        thread.join()
        bar.close()

    def complete(line: str) -> None:
        if not is_done.is_set():
            show(total_bytes)
            finish()
        print(line, file=sys.stderr, flush=True)

    show(0)
    thread = threading.Thread(target=poll, name="outrider-loading-bar", daemon=True)
    thread.start()
    try:
        yield complete
        if not is_done.is_set():
            show(total_bytes)
    finally:
        finish()
