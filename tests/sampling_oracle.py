"""The picking rule a second time: float64 NumPy, one token at a time, as slowly as it reads.

Shares nothing with the product but the meaning of SamplingParams and the integer hash behind the noise.
Beside the token it says whether the choice is firm: whether every other choice would need logits that differ
by more than rounding explains.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from outrider.request import SamplingParams

TOLERANCE = 2e-5  # by how much two honest computations of a logit may differ in float32
MASK32 = 0xFFFFFFFF


@dataclass(frozen=True)
class Choice:
    token_id: int
    is_firm: bool


def mix(x: np.ndarray | int, key: int = 0) -> np.ndarray:
    """The 32-bit mixing function, in 64-bit words that cannot overflow silently."""
    x = np.asarray(x, np.uint64) & np.uint64(MASK32)
    x = x ^ (x >> np.uint64(16))
    x = (x * np.uint64(0x7FEB352D)) & np.uint64(MASK32)
    x = x ^ np.uint64(key)
    x = x ^ (x >> np.uint64(15))
    x = (x * np.uint64(0x846CA68B)) & np.uint64(MASK32)
    return x ^ (x >> np.uint64(16))


def noise_bits(seed: int, position: int, token_ids: np.ndarray) -> np.ndarray:
    low, high = seed % 2**64 & MASK32, seed % 2**64 >> 32
    first = mix(low + int(mix(position + 0x9E3779B9)))
    second = mix(high ^ int(mix(int(first) + 0x85EBCA6B)))
    return mix(token_ids.astype(np.uint64) + first, int(second))


def gumbel(seed: int, position: int, token_ids: np.ndarray) -> np.ndarray:
    """The noise; its uniform number is rounded to float32, as the product must, the logarithms are not."""
    bits = noise_bits(seed, position, token_ids).astype(np.float32)
    u = (bits + np.float32(0.5)) * np.float32(2.0**-32 * (1 - 2.0**-24))
    return -np.log(-np.log1p(-u.astype(np.float64)))


def edited(
    logits: np.ndarray,
    params: SamplingParams,
    prompt: Sequence[int],
    answer: Sequence[int],
    banned: Collection[int],
    allowed: np.ndarray | None = None,
) -> np.ndarray:
    """The logits of one position after penalties, bias, bans and grammar, given all that stands before it."""
    out = np.array(logits, np.float64)
    for token_id in set(prompt) | set(answer):
        value = out[token_id]
        out[token_id] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
    for token_id in set(answer):
        out[token_id] -= params.presence_penalty + params.frequency_penalty * list(answer).count(token_id)
    for token_id, bias in params.logit_bias.items():
        out[token_id] += bias
    if len(answer) < params.min_tokens:
        for token_id in banned:
            out[token_id] = -np.inf
    for word in params.bad_word_ids:
        start = list(word[:-1])
        if start == list(answer)[len(answer) - len(start) :] and len(start) <= len(answer):
            out[word[-1]] = -np.inf
    for function in params.logits_processors:
        tokens, own = mx.array([*prompt, *answer]), mx.array(out[None].astype(np.float32))
        out = np.array(function(tokens, own), np.float64)[0]
    if params.allowed_token_ids:
        out[np.setdiff1d(np.arange(len(out)), params.allowed_token_ids)] = -np.inf
    if allowed is not None:
        out[~allowed] = -np.inf
    return out


def kept(scaled: np.ndarray, params: SamplingParams, slack: float = 0.0) -> np.ndarray:
    """Which tokens the filters leave; with slack > 0 those they might, with slack < 0 those they must."""
    vocab = len(scaled)
    order = np.lexsort((np.arange(vocab), -scaled))  # best first, equals by id
    values = scaled[order]
    num = min(params.top_k or vocab, vocab)
    weights = np.exp(values - values[0])
    weights[num:] = 0
    mass = np.concatenate([[0.0], np.cumsum(weights)])
    if slack < 0:  # all that might come before it does
        better = np.searchsorted(-values, -values - slack, side="right") - 1
        before = mass[better + 1] - weights
    elif slack > 0:  # only what surely comes before it does
        better = np.searchsorted(-values, -values - slack, side="left")
        before = mass[better]
    else:
        better = np.arange(vocab)
        before = mass[better]
    keep = better < num
    if params.top_p < 1:
        keep &= before < (params.top_p + 4 * slack) * weights.sum()
    if params.min_p > 0:
        keep &= values >= values[0] + np.log(params.min_p) - slack
    keep |= better == 0  # the best token always stays
    result = np.zeros(vocab, bool)
    result[order] = keep
    return result


def choose(logits: np.ndarray, position: int, params: SamplingParams, tolerance: float = TOLERANCE) -> Choice:
    """The token at this position, from edited logits."""
    if params.temperature == 0:
        scores, may_stay, must_stay = logits, np.ones(len(logits), bool), np.ones(len(logits), bool)
        chosen, slack = int(np.argmax(logits)), tolerance
    else:
        assert params.seed is not None
        scaled = logits / params.temperature
        slack = tolerance / params.temperature + 1e-5
        scores = scaled + gumbel(params.seed, position, np.arange(len(logits)))
        if params.is_filtered:
            stays, may_stay, must_stay = (kept(scaled, params, s) for s in (0.0, slack, -slack))
        else:
            stays = may_stay = must_stay = np.ones(len(logits), bool)
        chosen = int(np.argmax(np.where(stays, scores, -np.inf)))
    rivals = may_stay.copy()
    rivals[chosen] = False
    best_rival = np.max(scores[rivals], initial=-np.inf)
    return Choice(chosen, bool(must_stay[chosen] and scores[chosen] > best_rival + slack))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = np.array(logits, np.float64) - np.max(logits)
    return shifted - np.log(np.sum(np.exp(shifted)))


def chi_square_p(counts: np.ndarray, expected: np.ndarray | float) -> float:
    """Probability of counts at least this far off (Wilson and Hilferty's cube root)."""
    statistic = float(np.sum((counts - expected) ** 2 / expected))
    freedom = counts.size - 1
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return 0.5 * math.erfc(z / math.sqrt(2))
