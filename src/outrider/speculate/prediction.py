"""Drafts from a text that the client expects the answer to resemble, such as a file that is edited."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.speculate.drafter import Proposal
from outrider.speculate.ngram import MAX_NGRAM, NGRAM_SIZES


class PredictionDrafter:
    """Follows the prediction as long as the answer equals it, and finds it again where the answer differs."""

    def __init__(self, prediction_ids: Sequence[int], num_prompt: int) -> None:
        self._prediction = list(prediction_ids)
        self._num_prompt = num_prompt
        self._num_read = num_prompt  # tokens of the sequence that were compared with the prediction
        self._next: int | None = 0  # index in the prediction of the answer's next token; None: not known
        self._after: dict[tuple[int, ...], int] | None = None  # see _find

    def propose(self, token_ids: Sequence[int], num: int) -> Proposal | None:
        for token_id in token_ids[self._num_read :]:
            if self._next is not None and self._prediction[self._next : self._next + 1] == [token_id]:
                self._next += 1
            else:
                self._next = None
        self._num_read = len(token_ids)
        if self._next is None:
            self._next = self._find(token_ids[max(self._num_prompt, len(token_ids) - MAX_NGRAM) :])
        drafts = [] if self._next is None else self._prediction[self._next : self._next + num]
        return Proposal("prediction", drafts) if drafts else None

    def _find(self, answer: Sequence[int]) -> int | None:
        """The index after the last place in the prediction where the answer's last few tokens occur."""
        if self._after is None:  # built once: a row that has lost its place calls this at every step
            self._after = {
                tuple(self._prediction[end - size : end]): end
                for size in NGRAM_SIZES
                for end in range(size, len(self._prediction) + 1)
            }
        found = (self._after.get(tuple(answer[-size:])) for size in NGRAM_SIZES if size <= len(answer))
        return next((place for place in found if place is not None), None)
