"""From a tokenizer to the function that turns token ids into text, called for every token of every answer."""

from __future__ import annotations

import random
from typing import Any, Protocol

NUM_TRIALS, TRIAL_TOKENS = 64, 12


class Decode(Protocol):
    def __call__(self, token_ids: list[int], skips_special: bool) -> str: ...


def decoder(tokenizer: Any, vocab_size: int) -> Decode:
    """Without what a tokenizer wraps around its own decoding, where that is seen to change nothing."""

    def wrapped(token_ids: list[int], skips_special: bool) -> str:
        text: str = tokenizer.decode(
            token_ids, skip_special_tokens=skips_special, clean_up_tokenization_spaces=False
        )
        return text

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return wrapped

    def bare(token_ids: list[int], skips_special: bool) -> str:
        text: str = backend.decode(token_ids, skip_special_tokens=skips_special)
        return text

    special = list(getattr(tokenizer, "all_special_ids", ()))
    return bare if _are_equal(bare, wrapped, vocab_size, special) else wrapped


def _are_equal(one: Decode, other: Decode, vocab_size: int, special: list[int]) -> bool:
    numbers = random.Random(0)
    for _ in range(NUM_TRIALS):
        ids = [numbers.randrange(vocab_size) for _ in range(numbers.randint(1, TRIAL_TOKENS))]
        if special:
            ids.insert(numbers.randint(0, len(ids)), numbers.choice(special))
        for skips_special in (True, False):
            wanted = other(ids, skips_special)
            try:
                if one(ids, skips_special) != wanted:
                    return False
            except TypeError:  # not a decode that takes these
                return False
    return True
