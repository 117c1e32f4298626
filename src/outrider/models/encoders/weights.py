"""Reads an encoder's weights from safetensors files into a network, and checks every one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from outrider.models.encoders.families import EncoderFamily, renamed
from outrider.models.errors import ModelUnavailable

PATTERN = "model*.safetensors"


def load_weights(network: nn.Module, folder: Path, family: EncoderFamily, config: dict[str, Any]) -> None:
    """Fill the network. Raises ModelUnavailable, which names the tensor that is missing or damaged."""
    if config.get("quantization") is not None or config.get("quantization_config") is not None:
        raise ModelUnavailable(
            f"{folder} holds a quantised encoder, which is not supported: take the original weights."
        )
    wanted = dict(tree_flatten(network.parameters()))
    has_head = "head" in network
    found: dict[str, mx.array] = {}
    for name, array in _tensors(folder).items():
        own = renamed(name, family, has_head)
        if own is not None and own in wanted:
            _check(folder, name, array, wanted[own])
            found[own] = array
    if missing := sorted(wanted.keys() - found.keys()):
        raise ModelUnavailable(
            f"{folder} has no weights for {missing[0]!r}{_more(missing)}: the files are incomplete, or the "
            "model is of another kind than its config.json says."
        )
    network.load_weights(list(found.items()))


def _tensors(folder: Path) -> dict[str, mx.array]:
    files = sorted(folder.glob(PATTERN))
    if not files:
        raise ModelUnavailable(
            f"{folder} has no weights ({PATTERN}). Weights in other formats, such as pytorch_model.bin, are "
            "not read."
        )
    tensors: dict[str, mx.array] = {}
    for file in files:
        try:
            loaded: Any = mx.load(str(file))
            mx.eval(loaded)
        except (RuntimeError, ValueError) as error:
            raise ModelUnavailable(
                f"{file} cannot be read: {error}. It may be truncated: download it again."
            ) from None
        tensors |= loaded
    return tensors


def _check(folder: Path, name: str, array: mx.array, wanted: mx.array) -> None:
    if array.shape != wanted.shape:
        raise ModelUnavailable(
            f"{folder}: the tensor {name!r} has the shape {array.shape}, and config.json asks for "
            f"{wanted.shape}."
        )
    if not mx.issubdtype(array.dtype, mx.floating):
        raise ModelUnavailable(f"{folder}: the tensor {name!r} is of type {array.dtype}, which is not read.")
    if not mx.isfinite(array).all().item():
        raise ModelUnavailable(
            f"{folder}: the tensor {name!r} has values that are no numbers (NaN or infinite): the file is "
            "damaged. Download it again."
        )


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
