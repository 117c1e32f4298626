"""The files of a training run: each is written whole or not at all, and a failure is a TrainingError."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import mlx.core as mx

from outrider.files.atomic import atomic_file
from outrider.train.errors import TrainingError


def write_text(path: Path, text: str) -> None:
    with _writing(path) as file:
        file.write(text.encode())


def write_tensors(path: Path, tensors: Mapping[str, mx.array], metadata: Mapping[str, str]) -> None:
    with _writing(path) as file:
        mx.save_safetensors(file, dict(tensors), metadata=dict(metadata))


@contextmanager
def _writing(path: Path) -> Iterator[BinaryIO]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as file:
            yield file
    except OSError as error:
        raise TrainingError(f"{path} cannot be written: {error.strerror}.") from error
    except RuntimeError as error:  # from MLX, which does not always give the reason
        raise TrainingError(f"{path} cannot be written: {error}.") from error
