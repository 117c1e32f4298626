"""Drafts from a text that the client expects the answer to resemble (an edited file, say)."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.speculate.acceptance import Source

LONGEST = 4
SHORTEST = 2


class PredictionDrafter:
    """Walks along the prediction with the answer; where they part, finds the place where they meet again."""

    source: Source = "prediction"

    def __init__(self, prediction_ids: Sequence[int], num_prompt: int) -> None:
        self._prediction = list(prediction_ids)
        self._num_read = num_prompt  # tokens of the sequence looked at so far
        self._num_prompt = num_prompt
        self._place: int | None = 0  # where in the prediction the answer goes on; None: lost
        self._after: dict[tuple[int, ...], int] | None = None  # n-gram -> the place after it; made when lost

    def propose(self, token_ids: Sequence[int], num: int) -> Sequence[int]:
        for token_id in token_ids[self._num_read :]:
            if self._place is not None and self._expects(token_id):
                self._place += 1
            else:
                self._place = None
        self._num_read = len(token_ids)
        if self._place is None:
            self._place = self._find(token_ids[max(self._num_prompt, len(token_ids) - LONGEST) :])
        return [] if self._place is None else self._prediction[self._place : self._place + num]

    def _expects(self, token_id: int) -> bool:
        place = self._place
        return place is not None and place < len(self._prediction) and self._prediction[place] == token_id

    def _find(self, answer: Sequence[int]) -> int | None:
        """Just after the last place where the answer's last few tokens stand in the prediction."""
        if self._after is None:
            self._after = _places_after(self._prediction)
        for size in range(min(LONGEST, len(answer)), SHORTEST - 1, -1):
            place = self._after.get(tuple(answer[-size:]))
            if place is not None:
                return place
        return None


def _places_after(token_ids: Sequence[int]) -> dict[tuple[int, ...], int]:
    """Every n-gram and the place after its last occurrence: a lost row must not search at every step."""
    return {
        tuple(token_ids[end - size : end]): end
        for size in range(SHORTEST, LONGEST + 1)
        for end in range(size, len(token_ids) + 1)
    }
