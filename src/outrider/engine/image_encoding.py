"""How steps and image encoding share the engine's time. Pure Python."""

from __future__ import annotations


class EncodingTurns:
    """While rows decode, encoding gets at most half of the time: after a piece, steps get as much time."""

    def __init__(self) -> None:
        self._owed_to_steps_s = 0.0

    def may_encode(self, num_decoding: int) -> bool:
        return num_decoding == 0 or self._owed_to_steps_s <= 0

    def encoded(self, seconds: float) -> None:
        self._owed_to_steps_s = seconds

    def stepped(self, seconds: float) -> None:
        self._owed_to_steps_s -= seconds
