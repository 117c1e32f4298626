"""Drafts from a text that the client expects the answer to resemble (an edited file, say)."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST = 4


class PredictionDrafter:
    """Walks along the prediction with the answer; where they part, finds the place where they meet again."""

    def __init__(self, prediction_ids: Sequence[int], num_prompt: int) -> None:
        self._prediction = list(prediction_ids)
        self._num_read = num_prompt  # tokens of the sequence looked at so far
        self._num_prompt = num_prompt
        self._place: int | None = 0  # where in the prediction the answer goes on; None: lost

    def propose(self, token_ids: Sequence[int], num: int) -> Sequence[int]:
        for token_id in token_ids[self._num_read :]:
            if self._place is not None and self._expects(token_id):
                self._place += 1
            else:
                self._place = None
        self._num_read = len(token_ids)
        if self._place is None:
            self._place = self._find(token_ids[self._num_prompt :])
        return [] if self._place is None else self._prediction[self._place : self._place + num]

    def _expects(self, token_id: int) -> bool:
        place = self._place
        return place is not None and place < len(self._prediction) and self._prediction[place] == token_id

    def _find(self, answer: Sequence[int]) -> int | None:
        """Just after the last place where the answer's last few tokens stand in the prediction."""
        for size in range(min(LONGEST, len(answer)), 1, -1):
            ending = list(answer[-size:])
            for end in range(len(self._prediction), size - 1, -1):
                if self._prediction[end - size : end] == ending:
                    return end
        return None
