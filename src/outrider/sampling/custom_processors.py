"""Logits processors that the user wrote in Python: called on the host, for each position of a row's window.

At each position a function gets the tokens that plain decoding would have there: the committed ones and the
drafts before that position. An error ends the row's request, but only if the position is reached: the tokens
before it are committed, and a draft that is rejected takes the error with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from outrider.plan import RowPlan
from outrider.request import LogitsProcessor


@dataclass(frozen=True)
class RowError:
    """The first position of a row's window at which a function failed."""

    position: int
    message: str


@dataclass(frozen=True)
class CustomProcessors:
    rows: tuple[
        tuple[int, RowPlan], ...
    ]  # those that have functions, and their places among the sampling rows

    @classmethod
    def of(cls, rows: Sequence[RowPlan]) -> CustomProcessors | None:
        found = tuple((i, row) for i, row in enumerate(rows) if row.params.logits_processors)
        return cls(found) if found else None

    def apply(self, logits: mx.array) -> tuple[mx.array, dict[int, RowError]]:
        """A changed copy of the logits [rows, width, vocab], and the errors by row."""
        scores, errors = logits[:], {}
        for i, row in self.rows:
            drafts = list(row.token_ids[row.num_fed - row.num_drafts :])
            tokens = mx.array([*row.history, *drafts], mx.int32)
            for position in range(1 + row.num_drafts):
                try:
                    before = tokens[: len(row.history) + position]
                    changed = _changed(row.params.logits_processors, before, logits[i : i + 1, position])
                except Exception as error:
                    errors[i] = RowError(position, f"a logits processor failed: {_text(error)}")
                    break
                scores[i, position] = changed[0]
        return scores, errors


def _changed(functions: Sequence[LogitsProcessor], tokens: mx.array, logits: mx.array) -> mx.array:
    """Logits with NaN or +infinity would make an arbitrary choice: then every token is excluded."""
    shape = logits.shape
    for function in functions:
        found: Any = function(tokens, logits)
        if not isinstance(found, mx.array) or found.shape != shape:
            given = f"an array of shape {found.shape}" if isinstance(found, mx.array) else repr(found)[:100]
            raise ValueError(f"it gave {given} instead of an array of shape {shape}")
        logits = found.astype(mx.float32)
    is_usable = ~mx.any(mx.isnan(logits) | (logits == mx.inf))
    return mx.where(is_usable, logits, -mx.inf)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
