"""The result of a run: a head file in the `mtp.*` layout that `LLM` and `serve` find beside a model.

The file holds 16-bit or quantised weights, the draft vocabulary, and metadata: the model of the head and the
measured acceptance. Must not know how the head was trained.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from outrider.models.dtypes import settle_dtype
from outrider.models.heads import (
    LoadedHead,
    MTPHead,
    Quantization,
    QuantizedLayers,
    new_head,
    quantize_as_stored,
    quantize_layers,
)
from outrider.models.trunk import Trunk
from outrider.step.mtp import MTPDrafter
from outrider.train.checkpoint import Tree
from outrider.train.exchanges import Exchange
from outrider.train.output_files import write_tensors

MAX_DRAFT_IDS = 16_384  # as in recipes/default_head, whose README compares sizes
MAX_FLOAT16 = 65_504.0  # the largest finite value


def stored_weights(weights: Tree) -> Tree:
    """The weights in the dtype of the file: float16, or float32 if a weight is too large for float16."""
    fits = all((mx.abs(array).max() < MAX_FLOAT16).item() for array in _flat(weights).values())
    dtype = mx.float16 if fits else mx.float32
    return tree_map(lambda array: array.astype(dtype), weights)


def quantized_weights(weights: Tree, how: Quantization, trunk: Trunk) -> tuple[Tree, QuantizedLayers]:
    """The weights with quantised linear layers. HeadError: no layer can be quantised in this way."""
    head = new_head(trunk)
    head.update(weights)
    layers = quantize_layers(head, how, trunk)
    return head.parameters(), layers.renamed(lambda name: f"mtp.{name}")


def served_head(weights: Tree, trunk: Trunk) -> MTPHead:
    """The head in the form that a server loads from the file."""
    head = new_head(trunk)
    quantize_as_stored(head, _flat(weights))
    head.update(weights)
    settle_dtype(head, "auto", trunk.dtype)
    return head


def draft_vocabulary(exchanges: Iterable[Exchange], head: MTPHead, trunk: Trunk) -> mx.array | None:
    """The ids of the answers, most frequent first. None: the trunk's projection cannot be reduced."""
    counts = Counter(token_id for one in exchanges for token_id in one.answer_ids)
    most = min(MAX_DRAFT_IDS, trunk.vocab_size // 2)
    ranked = sorted(counts, key=lambda token_id: (-counts[token_id], token_id))
    draft_ids = mx.array(ranked[:most], mx.int32)
    try:
        MTPDrafter(LoadedHead((head,), "", draft_ids), trunk)
    except (AttributeError, TypeError, ValueError):
        return None  # the drafter cannot take rows out of this family's projection
    return draft_ids


def num_bytes(weights: Tree) -> int:
    return sum(array.nbytes for array in _flat(weights).values())


def write_head(path: Path, weights: Tree, draft_ids: mx.array | None, metadata: Mapping[str, str]) -> None:
    tensors = {f"mtp.{name}": array for name, array in _flat(weights).items()}
    if draft_ids is not None:
        tensors["mtp.draft_ids"] = draft_ids
    write_tensors(path, tensors, {"format": "mlx", **metadata})


def trunk_fingerprint(name: str, config: Mapping[str, Any]) -> dict[str, str]:
    """The model of a head, by name and by the hash of its config."""
    canonical = json.dumps(config, sort_keys=True, separators=(",", ":"))
    return {"trunk": name, "trunk_config_sha256": hashlib.sha256(canonical.encode()).hexdigest()}


def _flat(weights: Tree) -> dict[str, mx.array]:
    named: list[tuple[str, mx.array]] = tree_flatten(weights)  # type: ignore[assignment]
    return dict(named)
