"""A drafter that knows the plain output and errs on purpose, so that every accepted length occurs."""

from __future__ import annotations

import random
from collections.abc import Sequence

from outrider.speculate.drafter import Proposal


class ScriptedDrafter:
    """Right up to a random place, wrong there, and after it either right again or anything.

    Right tokens after a wrong one are the sharpest test: a verifier that looks past the first error would
    commit them.
    """

    def __init__(self, plain: Sequence[int], vocab_size: int, rng: random.Random) -> None:
        self._plain = list(plain)  # prompt and answer of the plain run
        self._vocab_size = vocab_size
        self._rng = rng

    def propose(self, token_ids: Sequence[int], num: int) -> Proposal | None:
        rng = self._rng
        drafts = self._plain[len(token_ids) : len(token_ids) + num]
        drafts += [self._anything() for _ in range(num - len(drafts))]
        wrong = rng.randint(0, num)  # num: nowhere
        if wrong < num:
            drafts[wrong] = (drafts[wrong] + rng.randint(1, self._vocab_size - 1)) % self._vocab_size
            if rng.random() < 0.5:
                drafts[wrong + 1 :] = [self._anything() for _ in drafts[wrong + 1 :]]
        if rng.random() < 0.2:
            drafts = drafts[: rng.randint(0, num)]
        return Proposal("prediction", drafts) if drafts else None

    def _anything(self) -> int:
        return self._rng.randrange(self._vocab_size)
