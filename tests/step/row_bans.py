"""Random bans of a row: bad words, allowed tokens, and logits processors written by a user.

They are drawn from the row's own parameters, not from the history's random numbers, so that histories without
bans stay what they were.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

import mlx.core as mx

from outrider.request import SamplingParams

NUM_BAD_TOKENS, NUM_BAD_PAIRS = 30, 1000  # enough to matter in a vocabulary of about a hundred
MIN_ALLOWED = 8


def with_random_bans(params: SamplingParams, vocab_size: int) -> SamplingParams:
    """One of three rows gets some, unless it has a grammar: the two might leave no token."""
    rng = random.Random(repr((params.seed, params.max_tokens, params.temperature, params.logit_bias)))
    kind = rng.choice(("bad words", "allowed", "function", *[""] * 6))
    if params.grammar is not None or params.thinking_token_budget is not None or not kind:
        return params
    if kind == "function":
        return replace(params, logits_processors=(prefer_by_last, forbid_last_pair))
    excluded = {i for i, bias in params.logit_bias.items() if bias == -math.inf} | {*params.stop_token_ids}
    if kind == "allowed":
        left = [i for i in range(vocab_size) if i not in excluded]
        allowed = rng.sample(left, rng.choice((MIN_ALLOWED, len(left) // 2)))
        return replace(params, allowed_token_ids=(*allowed, *params.stop_token_ids))
    single = [(rng.randrange(vocab_size),) for _ in range(NUM_BAD_TOKENS)]
    several = [
        tuple(rng.randrange(vocab_size) for _ in range(rng.choice((2, 2, 2, 3))))
        for _ in range(NUM_BAD_PAIRS)
    ]
    return replace(params, bad_word_ids=(*single, *several))


def without_bans(params: SamplingParams) -> SamplingParams:
    """For a row that gets a grammar or a thinking budget."""
    return replace(params, bad_word_ids=(), allowed_token_ids=(), logits_processors=())


def prefer_by_last(tokens: mx.array, logits: mx.array) -> mx.array:
    """Depends on the last token and on their number: with other drafts before it, it prefers other tokens."""
    ids = mx.arange(logits.shape[-1])
    return logits + 3.0 * ((ids + tokens[-1] + tokens.size) % 3 == 0)


def forbid_last_pair(tokens: mx.array, logits: mx.array) -> mx.array:
    """In place, as mlx-lm's own functions change their argument."""
    logits[:, tokens[-2:]] = -mx.inf
    return logits
