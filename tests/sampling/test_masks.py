"""Grammar masks: -inf where a row's grammar forbids a token, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from outrider.request import SamplingParams
from outrider.sampling.masks import Masks
from plan_rows import plan_row

pytestmark = pytest.mark.usefixtures("both_ways")


@pytest.mark.parametrize("for_trace", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
@pytest.mark.parametrize(("vocab", "extra_words"), [(1, 0), (31, 0), (64, 1), (1003, 0), (5000, 2)])
def test_forbidden_tokens_have_no_chance_and_others_keep_theirs(
    vocab: int, extra_words: int, share: float, for_trace: bool
) -> None:
    """The masks of some rows, of one to three positions."""
    numbers = np.random.default_rng(vocab)
    num_words = -(-vocab // 32) + extra_words
    nums = (3, None, 1, None, 2)  # masks of each row; None: it has no grammar
    bits = [None if num is None else numbers.random((num, num_words * 32)) < share for num in nums]
    rows = []
    for slot, own in enumerate(bits):
        row = plan_row([1], params=SamplingParams(), slot=slot)
        packed = None if own is None else np.packbits(own, axis=1, bitorder="little").view(np.uint32)
        rows.append(row if packed is None else replace(row, masks=packed))
    logits = numbers.standard_normal((len(rows), 3, vocab)).astype(np.float32)
    found = np.array(Masks.of(rows, 3, for_trace).apply(mx.array(logits)))
    for i, own in enumerate(bits):
        for place in range(3):
            expected = logits[i, place]
            if own is not None:
                if place >= len(own):
                    continue  # never read
                expected = np.where(own[place, :vocab], expected, -np.inf)
            assert np.array_equal(found[i, place], expected)
