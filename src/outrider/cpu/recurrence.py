"""Recurrent layers on CPUs, token after token in one operation (native/extension/recurrence.h).

A chunked form adds in another order for another width, and the last bits differ. A quantised layer that
follows rounds tokens and magnifies the difference. The chunked form is also slower: milliseconds for one
layer with 16 heads of 128 x 128, on two busy cores:

    rows x tokens    1 x 1    1 x 3    8 x 1    8 x 3    1 x 512
    chunked           0.55     0.63     4.36     4.95      58
    this              0.32     0.27     1.27     2.36      35
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from outrider.cpu import extension


def applies() -> bool:
    """True if MLX computes on the CPU and there is an extension."""
    return mx.default_device() == mx.Device(mx.cpu) and extension.extension() is not None


@dataclass(frozen=True)
class TokenInputs:
    """The inputs of a recurrent layer for the tokens of a pass."""

    queries: mx.array | None  # [rows, tokens, key_heads, key_dim]; None: no outputs are wanted
    keys: mx.array  # [rows, tokens, key_heads, key_dim]
    values: mx.array  # [rows, tokens, heads, value_dim]
    log_gates: mx.array  # [rows, tokens, heads] or [rows, tokens, heads, key_dim]; 0 for padding
    betas: mx.array  # [rows, tokens, heads]; 0 for padding
    is_delta_rule: bool

    def outputs(self, state: mx.array) -> mx.array:
        """The outputs of all tokens.  [rows, tokens, heads, value_dim]"""
        return self._run(self.queries, state, None)[0]

    def state_after(self, state: mx.array, counts: mx.array) -> mx.array:
        """The states after the first `counts` [rows] tokens of each row."""
        return self._run(None, state, counts)[0]

    def outputs_and_state(self, state: mx.array, counts: mx.array) -> tuple[mx.array, mx.array]:
        outputs, after = self._run(self.queries, state, counts)
        return outputs, after

    def _run(self, queries: mx.array | None, state: mx.array, counts: mx.array | None) -> list[mx.array]:
        gates = mx.exp(self.log_gates if self.log_gates.ndim == 4 else self.log_gates[..., None])
        found: list[mx.array] = extension.loaded().recurrence(
            queries, self.keys, self.values, gates, self.betas, state, counts, self.is_delta_rule
        )
        return found
