"""Drafter invariance on this device: answers must not depend on drafts, on other rows, or on fast layers.

On a CPU the tokens must be the same. On a GPU a wider pass rounds differently, so two tokens that are almost
equally likely may change places. There the log-probabilities are compared, as far as the texts before them
are the same: rounding changes them little, and a wrong cell or mask changes them a lot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx

from outrider.cli.doctor.decoding import Answer, Decoder, Prompt
from outrider.cli.doctor.random_model import RandomModel
from outrider.models import machine
from outrider.models.layer_swaps import without_speed_swaps
from outrider.plan import TokenLogprobs

DEPTH = 3  # drafts of a step
NUM_ROWS = 4
# The largest difference of a log-probability that rounding may make; logits of these models are about 1.
TOLERANCE = {mx.float32: 1e-2, mx.bfloat16: 0.25, mx.float16: 0.05}


@dataclass(frozen=True)
class Comparison:
    """One way to decode, compared with one row alone and without drafts."""

    model: str
    name: str
    num_answers: int
    num_equal: int
    largest_difference: float  # of log-probabilities
    problem: str | None = None  # None: as it should be

    @property
    def summary(self) -> str:
        return (
            f"{self.num_equal} of {self.num_answers} answers equal, "
            f"log-probabilities within {self.largest_difference:.1e}"
        )


def compare(model: RandomModel, num_tokens: int) -> Iterator[Comparison]:
    """Each way to decode, one after the other."""
    prompts = _prompts(model.trunk.vocab_size)
    decoder = Decoder(model, num_tokens)
    plain = [decoder.decode([prompt])[0] for prompt in prompts]
    must_be_equal = machine.is_cpu()

    def compared(name: str, found: Sequence[Answer], has_drafts: bool, exact: bool) -> Comparison:
        return _compared(model, name, plain, found, has_drafts, exact)

    in_batch = decoder.decode(prompts)
    yield compared("in a batch", in_batch, has_drafts=False, exact=must_be_equal)
    alone = [decoder.decode([prompt], DEPTH, [own])[0] for prompt, own in zip(prompts, plain, strict=True)]
    yield compared("alone, with drafts", alone, has_drafts=True, exact=must_be_equal)
    predicted = [own if i % 2 else None for i, own in enumerate(plain)]  # the others draft with the head
    drafted = decoder.decode(prompts, DEPTH, predicted)
    yield compared("in a batch, with drafts", drafted, has_drafts=True, exact=must_be_equal)
    from_head = decoder.decode(prompts, DEPTH)  # only such rows are overlapped, on a GPU
    yield compared("in a batch, with drafts of the head", from_head, has_drafts=False, exact=must_be_equal)
    with without_speed_swaps(*model.networks):
        own_layers = Decoder(model, num_tokens, is_served=False).decode(prompts)
    yield compared("with mlx-lm's own layers", own_layers, has_drafts=False, exact=False)


def _compared(
    model: RandomModel,
    name: str,
    plain: Sequence[Answer],
    found: Sequence[Answer],
    has_drafts: bool,
    exact: bool,
) -> Comparison:
    pairs = list(zip(plain, found, strict=True))
    num_equal = sum(one.token_ids == other.token_ids for one, other in pairs)
    difference = max(_difference(*pair) for pair in pairs)
    tolerance = TOLERANCE[model.trunk.dtype]
    problem = None
    if exact and num_equal < len(pairs):
        problem = f"{len(pairs) - num_equal} of {len(pairs)} answers differ"
    elif not difference <= tolerance:  # also if it is NaN
        problem = f"log-probabilities differ by {difference:.1e}, more than {tolerance:g}"
    elif has_drafts and not any(answer.num_accepted for answer in found):
        problem = "no draft was accepted, although most were right"
    return Comparison(model.name, name, len(pairs), num_equal, difference, problem)


def _difference(one: Answer, other: Answer) -> float:
    """The largest difference of a token's log-probability, up to the first token that differs, included."""
    largest = 0.0
    for first, second in zip(one.logprobs, other.logprobs, strict=True):
        known, same = _by_token(first), _by_token(second)
        largest = max([largest, *(abs(known[token] - same[token]) for token in known.keys() & same.keys())])
        if first.token_id != second.token_id:
            break
    return largest


def _by_token(found: TokenLogprobs) -> dict[int, float]:
    return {found.token_id: found.logprob, **dict(found.top)}


def _prompts(vocab_size: int) -> list[Prompt]:
    """Of different lengths; every second row samples."""
    return [
        Prompt(
            tuple((31 * i * i + 17 * place * (i + 3) + 5) % vocab_size for place in range(9 + 8 * i)),
            0.0 if i % 2 == 0 else 0.8,
            i,
        )
        for i in range(NUM_ROWS)
    ]
