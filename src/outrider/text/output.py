"""The text of one answer as its client may see it: whole characters, cut before the first stop string."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.text.detokenizer import Decode, Detokenizer
from outrider.text.stop import StopStrings


class AnswerText:
    """Takes committed tokens, gives text that will not change: a detokenizer and a watch for stop strings.

    A stop string that ends within the first `min_tokens` tokens is not one.
    """

    def __init__(
        self, decode: Decode, prompt_ids: Sequence[int], stops: Sequence[str], min_tokens: int = 0
    ) -> None:
        self._detokenizer = Detokenizer(decode, prompt_ids)
        self._stops = StopStrings(stops)
        self._num_bound = min_tokens  # tokens to come whose text cannot end the answer

    def push(self, token_id: int) -> tuple[str, str | None]:
        """The text that is final now, and the stop string that was completed, if one was."""
        text = self._detokenizer.push(token_id)
        found = self._stops.push(text, may_match=self._num_bound <= 0)
        self._num_bound -= 1
        return found.text, found.matched

    def flush(self) -> str:
        """What was held back, once no token can follow; a stop string in it still cuts."""
        found = self._stops.push(self._detokenizer.flush(), may_match=self._num_bound < 0)
        return found.text if found.matched is not None else found.text + self._stops.flush()
