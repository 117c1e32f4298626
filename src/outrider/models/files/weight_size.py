"""How much memory a model's weights take: an estimate from the headers of its files, and what is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from outrider.files.safetensors import InvalidSafetensors, SafetensorsHeader, TensorEntry, read_header
from outrider.models import machine
from outrider.models.dtypes import WORD_BITS, keeps_quantized
from outrider.models.errors import ModelUnavailable

FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # bytes of each dtype that a load may cast
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
DEFAULT_BITS = 4  # of quantised weights whose config does not tell


def estimated_bytes(folder: Path, config: dict[str, Any], dtype: str = "auto") -> int:
    """What the weights of a model folder will take when they are loaded as `dtype`. Reads headers only.

    Raises ModelUnavailable if a file is damaged or there is none.
    """
    headers = list(_headers(folder))
    if not headers:
        raise ModelUnavailable(f"{folder} has no weights (model*.safetensors).")
    return sum(_num_bytes(header, config, dtype) for header in headers)


def loaded_bytes(modules: Iterable[nn.Module]) -> int:
    """Bytes of all arrays of the modules; arrays that they share count once."""
    arrays: dict[int, mx.array] = {}
    for module in modules:
        arrays |= {id(array): array for array in dict(tree_flatten(module.parameters())).values()}
    return sum(array.nbytes for array in arrays.values())


def _headers(folder: Path) -> Iterator[SafetensorsHeader]:
    for file in sorted({*folder.glob("*.safetensors"), *folder.glob("mtp/*.safetensors")}):
        if not file.is_file():  # to open a pipe would wait for ever
            raise ModelUnavailable(f"{file} is not a file.")
        try:
            with file.open("rb") as opened:
                yield read_header(opened)
        except InvalidSafetensors as error:
            raise ModelUnavailable(f"{file} cannot be read: {error}.") from error
        except OSError as error:
            raise ModelUnavailable(f"{file} cannot be read: {error.strerror}.") from error


def _num_bytes(header: SafetensorsHeader, config: dict[str, Any], dtype: str) -> int:
    cast = DTYPE_BYTES.get(dtype, 4 if machine.is_cpu() else None)  # bytes of a float; None: as it is stored
    keeps = keeps_quantized(dtype)
    quantization = config.get("quantization")
    bits = quantization.get("bits", DEFAULT_BITS) if isinstance(quantization, dict) else DEFAULT_BITS
    return sum(
        _tensor_bytes(name, entry, header, cast, keeps, bits) for name, entry in header.tensors.items()
    )


def _tensor_bytes(
    name: str, entry: TensorEntry, header: SafetensorsHeader, cast: int | None, keeps: bool, bits: int
) -> int:
    stem, _, part = name.rpartition(".")
    is_quantized = f"{stem}.scales" in header.tensors
    if is_quantized and not keeps:
        codes = entry.num_bytes // 4 * WORD_BITS // max(1, bits) if part == "weight" else 0
        return codes * (cast or 4)
    if cast is None or entry.dtype not in FLOATS or (is_quantized and part in ("scales", "biases")):
        return entry.num_bytes
    return entry.num_bytes // FLOATS[entry.dtype] * cast
