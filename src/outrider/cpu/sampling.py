"""Draws tokens on CPUs, with native operations on all threads (native/extension/sampling.h and masks.h).

For 16 rows of 49,152 tokens MLX's operations take 13 to 20 ms, and `draw` takes 0.2: few tokens can win, and
only their noise is computed. All functions return None where the operations are not for this device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from outrider.cpu import extension

NUMBERS = ("inverse_temperature", "seeds", "top_k", "top_p", "log_min_p")


def draw(
    logits: mx.array,
    positions: mx.array,
    numbers: Mapping[str, mx.array],
    token_ids: mx.array | None,
    wants_margins: bool,
) -> tuple[mx.array, mx.array] | None:
    """The tokens and their margins.

    logits [rows, n, vocab], positions [rows, n], numbers as in sampling/sampler.py, token_ids [vocab]
    """
    native = _native(logits)
    if native is None:
        return None
    inverse_temperature, seeds, *filters = ordered(numbers)
    tokens, margins = native.sample(
        logits, positions, inverse_temperature, seeds, filters, token_ids, wants_margins
    )
    return tokens, margins


def ordered(numbers: Mapping[str, mx.array]) -> list[mx.array]:
    """The numbers of all rows in the order in which native operations take them."""
    return [numbers[name] for name in NUMBERS if name in numbers]


def mask(logits: mx.array, words: mx.array, rows: tuple[int, ...]) -> mx.array | None:
    """A copy of the logits with -inf where a mask has no bit.

    logits [rows, n, vocab], words [masked rows, n, words] uint32, rows: those that have a mask
    """
    native = _native(logits)
    if native is None:
        return None
    masked: mx.array = native.mask_logits(logits, words, mx.array(rows, mx.int32))
    return masked


def logprobs(logits: mx.array, targets: mx.array, num_top: int) -> tuple[mx.array, mx.array, mx.array] | None:
    """Log-probabilities of the targets [rows, n], and the most likely tokens: ids and log-probabilities."""
    native = _native(logits)
    if native is None:
        return None
    of_targets, top_ids, top = native.logprobs(logits, targets, num_top)
    return of_targets, top_ids, top


def _native(logits: mx.array) -> Any:
    return extension.if_loaded() if logits.dtype == mx.float32 else None
