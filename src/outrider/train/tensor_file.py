"""Safetensors files that are there whole or not at all. Must not know what is in them."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx

from outrider.train.errors import TrainingError


def write_tensors(path: Path, tensors: Mapping[str, mx.array], metadata: Mapping[str, str]) -> None:
    """Replaces an older file in one step; TrainingError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{path.stem}.part-", dir=path.parent) as scratch:
            part = Path(scratch) / path.name
            mx.save_safetensors(str(part), dict(tensors), metadata=dict(metadata))
            _bring_to_disk(part, sum(array.nbytes for array in tensors.values()))
            os.replace(part, path)
    except OSError as error:
        raise TrainingError(f"{path} cannot be written: {error.strerror}.") from error
    except RuntimeError as error:  # MLX does not say why: mostly a full disk
        raise TrainingError(f"{path} cannot be written: {error}.") from error


def _bring_to_disk(path: Path, least_bytes: int) -> None:
    if path.stat().st_size <= least_bytes:  # MLX does not always notice a full disk
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
