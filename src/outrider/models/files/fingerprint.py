"""A fingerprint of a model's weights: stored files of another model or head must never be used by mistake.

Computed from the loaded arrays: names, shapes, dtypes and all values. So a fine-tune, another quantisation or
another --dtype has another fingerprint. It protects against mistakes, not against forgery.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

CHUNK_WORDS = 1 << 24  # 32-bit words in one checksum, which bounds the temporary memory; chosen by hand
LENGTH = 24  # hex digits


def fingerprint(modules: Iterable[nn.Module], *facts: object) -> str:
    """`facts`: anything else that changes the results of the modules."""
    digest = hashlib.sha256()
    for module in modules:
        settings = getattr(module, "args", None)  # of an mlx-lm model: scales, rope, windows
        digest.update(f"{type(module).__module__}.{type(module).__qualname__} {settings!r}\n".encode())
        for name, array in sorted(dict(tree_flatten(module.parameters())).items()):
            line = f"{name} {array.shape} {array.dtype} {_checksums(array)}\n"
            digest.update(line.encode())
    for fact in facts:
        digest.update(f"{fact!r}\n".encode())
    return digest.hexdigest()[:LENGTH]


def _checksums(array: mx.array) -> list[int]:
    """Return a checksum for each chunk: the sum of its words, each mixed with its index."""
    words = mx.contiguous(array).reshape(-1).view(mx.uint8)
    words = mx.pad(words, (0, -words.size % 4)).view(mx.uint32)
    sums = []
    for start in range(0, words.size, CHUNK_WORDS):
        part = words[start : start + CHUNK_WORDS]
        mixed = (part ^ (mx.arange(part.size, dtype=mx.uint32) * 2654435761)) * 2246822519
        mixed = (mixed ^ (mixed >> 15)) * 3266489917
        sums.append(mx.sum(mixed ^ (mixed >> 13)))
    return np.array(mx.stack(sums)).tolist() if sums else []
