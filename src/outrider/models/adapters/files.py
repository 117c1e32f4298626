"""Reads an adapter's folder: adapter_config.json and adapters.safetensors, as mlx-lm writes them. No MLX.

Everything is checked before MLX reads the tensors: the folder may have been named over HTTP. The file is read
once, so that the fingerprint is that of the tensors which are used.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from outrider.request import is_int

CONFIG, TENSORS = "adapter_config.json", "adapters.safetensors"
MAX_RANK = 512  # chosen by hand: several times the largest that is in use
MAX_CONFIG_BYTES = 1 << 20  # chosen by hand
MAX_HEADER_BYTES = 16 << 20  # of a safetensors file; chosen by hand: a name takes some 150 bytes
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}

AdapterKind = Literal["lora", "dora"]


class AdapterError(ValueError):
    """The adapter cannot be used. The message names the file or the layer, and the reason."""


@dataclass(frozen=True)
class AdapterFiles:
    """The contents of an adapter's folder."""

    path: Path
    kind: AdapterKind
    rank: int
    scale: float
    shapes: Mapping[str, tuple[int, ...]]  # by the name of the tensor
    tensors: bytes  # the safetensors file
    fingerprint: str  # of the contents: equal adapters have equal ones, whatever their names and folders

    @property
    def layers(self) -> list[str]:
        """The paths of the layers that the adapter changes."""
        return sorted({name.rpartition(".")[0] for name in self.shapes})


def read_adapter(path: str | Path, max_bytes: int | None = None) -> AdapterFiles:
    """Raises AdapterError. `max_bytes`: of the tensors; None: no limit."""
    try:
        folder = Path(path).expanduser()
        is_folder = folder.is_dir()
    except (OSError, ValueError, RuntimeError):  # too long, a null byte, the home of an unknown user
        is_folder = False
    if not is_folder:
        raise AdapterError(f"{str(path)[:200]}: there is no such folder with an adapter.")
    kind, rank, scale = _read_config(folder / CONFIG)
    file = folder / TENSORS
    tensors = _read(file, max_bytes, "adapters may take (--adapter-memory)")
    shapes = _read_shapes(file, tensors)
    _check_shapes(file, shapes, kind, rank)
    digest = hashlib.sha256(f"{kind} {scale!r}\n".encode() + tensors).hexdigest()[:32]
    return AdapterFiles(folder, kind, rank, scale, shapes, tensors, digest)


def _read(file: Path, max_bytes: int | None, what: str) -> bytes:
    try:
        with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
            facts = os.fstat(opened.fileno())
            if not stat.S_ISREG(facts.st_mode):  # a pipe would never end
                raise AdapterError(f"{file} is not a regular file.")
            if max_bytes is not None and facts.st_size > max_bytes:
                raise AdapterError(
                    f"{file} has {facts.st_size:,} bytes, more than the {max_bytes:,} that {what}."
                )
            return opened.read(facts.st_size)
    except FileNotFoundError:
        raise AdapterError(f"{file} is missing: an adapter's folder has {CONFIG} and {TENSORS}.") from None
    except OSError as error:
        raise AdapterError(f"{file} cannot be read: {error.strerror}.") from error


def _read_config(file: Path) -> tuple[AdapterKind, int, float]:
    try:
        config = json.loads(_read(file, MAX_CONFIG_BYTES, "a config may have"))
    except (ValueError, RecursionError) as error:
        if isinstance(error, AdapterError):
            raise
        raise AdapterError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise AdapterError(f"{file} must hold a JSON object.")
    if "peft_type" in config:
        raise AdapterError(
            f"{file} is of the Hugging Face library peft, whose tensors have other names and shapes. "
            "Outrider reads adapters that mlx-lm has trained (mlx_lm.lora)."
        )
    kind = config.get("fine_tune_type", "lora")
    if kind == "full":
        raise AdapterError(
            f"{file}: fine_tune_type is full: these are whole weights, not an adapter. Fuse them."
        )
    if kind not in ("lora", "dora"):
        raise AdapterError(f"{file}: fine_tune_type must be lora or dora, not {kind!r}.")
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, dict):
        raise AdapterError(f"{file} has no lora_parameters (rank and scale).")
    return kind, *_rank_and_scale(file, parameters)


def _rank_and_scale(file: Path, parameters: Mapping[str, Any]) -> tuple[int, float]:
    rank, scale = parameters.get("rank"), parameters.get("scale")
    if not is_int(rank) or not 1 <= rank <= MAX_RANK:
        raise AdapterError(f"{file}: the rank must be a whole number from 1 to {MAX_RANK}, not {rank!r}.")
    if scale is None and "alpha" in parameters:
        raise AdapterError(f"{file} has alpha, and mlx-lm's adapters have scale instead (alpha / rank).")
    if not isinstance(scale, int | float) or isinstance(scale, bool) or not math.isfinite(scale):
        raise AdapterError(f"{file}: the scale must be a number, not {scale!r}.")
    return rank, float(scale)


def _read_shapes(file: Path, data: bytes) -> dict[str, tuple[int, ...]]:
    """The shapes in the header of a safetensors file. Raises AdapterError if the file is cut short."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or not 0 < size <= min(MAX_HEADER_BYTES, len(data) - 8):
        raise AdapterError(f"{file} is damaged: it is no safetensors file, or is cut short.")
    try:
        header = json.loads(data[8 : 8 + size])
        header.pop("__metadata__", None)
        shapes = {name: _checked_shape(facts, len(data) - 8 - size) for name, facts in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise AdapterError(f"{file} is damaged: {error}") from None
    if not shapes:
        raise AdapterError(f"{file} holds no tensors.")
    return shapes


def _checked_shape(facts: Mapping[str, Any], num_bytes: int) -> tuple[int, ...]:
    shape, (start, end) = tuple(facts["shape"]), facts["data_offsets"]
    if facts["dtype"] not in ITEM_BYTES:
        raise ValueError(f"a tensor has the type {facts['dtype']!r}, not one of {', '.join(ITEM_BYTES)}")
    if not all(is_int(x) and x >= 0 for x in (*shape, start, end)):
        raise ValueError("a tensor has no valid shape or place")
    if end > num_bytes:
        raise ValueError("it is cut short")
    if end - start != math.prod(shape) * ITEM_BYTES[facts["dtype"]]:
        raise ValueError(f"a tensor of the shape {shape} has {end - start} bytes")
    return shape


def _check_shapes(file: Path, shapes: Mapping[str, tuple[int, ...]], kind: AdapterKind, rank: int) -> None:
    wanted = {"lora_a", "lora_b"} | ({"m"} if kind == "dora" else set())
    layers: dict[str, set[str]] = {}
    for name, shape in shapes.items():
        path, _, leaf = name.rpartition(".")
        if leaf not in wanted or not path:
            raise AdapterError(
                f"{file}: {name} is no tensor of a {kind} adapter ({', '.join(sorted(wanted))})."
            )
        layers.setdefault(path, set()).add(leaf)
        if leaf != "m" and (len(shape) not in (2, 3) or rank not in shape):
            raise AdapterError(f"{file}: {name} has the shape {shape}, and the rank is {rank}.")
    for path, found in layers.items():
        if found != wanted:
            missing = ", ".join(sorted(wanted - found))
            raise AdapterError(f"{file} is incomplete: {path} has no {missing}.")
