"""A progress bar for weights on their way into memory: what MLX holds by now, of what the files hold."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx

from outrider.models.files.progress import Progress, TerminalBar

POLL_S = 0.1


@contextmanager
def loading_bar(folder: Path, name: str) -> Iterator[Callable[[str], None]]:
    """Draws while its body runs; the loading itself is done elsewhere, on the engine's thread.

    Gives a function that ends the bar and says what is done after the loading.
    """
    total_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    bar, done = TerminalBar(), threading.Event()
    stage, before = f"Loading {name}", mx.get_active_memory()

    def draw() -> None:
        while not done.wait(POLL_S):
            held = max(0, mx.get_active_memory() - before)
            bar(Progress(stage, min(held, total_bytes), total_bytes))

    def say(line: str) -> None:
        done.set()
        bar(Progress(stage, total_bytes, total_bytes))
        bar.close()
        print(line, file=sys.stderr, flush=True)

    bar(Progress(stage, 0, total_bytes))
    drawing = threading.Thread(target=draw, name="outrider-loading-bar", daemon=True)
    drawing.start()
    try:
        yield say
        if not done.is_set():
            bar(Progress(stage, total_bytes, total_bytes))
    finally:
        done.set()
        drawing.join()
        bar.close()
