"""Which targets a batch has, and an order of batches that a resumed run can take up anywhere."""

from __future__ import annotations

import itertools
import random

import mlx.core as mx
import numpy as np
import pytest

from outrider.train import batches as batches_module
from outrider.train.batches import MAX_TOKENS_PER_TARGET, batches_from, epoch_batches, make_batch, split
from outrider.train.exchanges import Exchange


def _exchange(num_prompt: int, num_answer: int, mark: int = 7) -> Exchange:
    return Exchange((mark,) * num_prompt, tuple(range(20, 20 + num_answer)), False, False)


def _some(num: int, seed: int = 0) -> list[Exchange]:
    rng = random.Random(seed)
    return [_exchange(rng.randint(1, 30), rng.randint(2, 60), mark=i) for i in range(num)]


def test_targets_are_the_answers_tokens_after_the_first() -> None:
    batch = make_batch([_exchange(3, 4), _exchange(1, 2)], depths=2)
    width = batch.token_ids.shape[1]
    assert batch.target_cells.tolist() == [3, 4, 5, width + 1]
    assert batch.next_ids.tolist() == [21, 22, 23, 21]
    assert batch.num_chains.tolist() == [1, 2, 2, 1]  # the first draft is made once the first token is there


def test_guesses_of_depth_d_come_from_d_pairs_before_the_target() -> None:
    batch = make_batch([_exchange(3, 5)], depths=3)
    width = batch.token_ids.shape[1]
    outputs = [mx.arange(width)[None, :, None] + 100 * depth for depth in (1, 2, 3)]
    for depth, guesses in enumerate(batch.guesses(outputs), 1):
        assert guesses[:, 0].tolist() == [100 * depth + s - depth for s in (3, 4, 5, 6)]
    assert batch.at_targets(outputs[0])[:, 0].tolist() == [103, 104, 105, 106]


def test_padding_is_on_the_right_and_no_target() -> None:
    batch = make_batch([_exchange(2, 3), _exchange(2, 30)], depths=1)
    assert np.array(batch.token_ids)[0, 5:].tolist() == [0] * (batch.token_ids.shape[1] - 5)
    assert batch.num_targets == 2 + 29


def test_an_epoch_holds_every_exchange_once_in_batches_of_similar_length() -> None:
    exchanges = _some(100)
    batches = epoch_batches(exchanges, 256, random.Random(1))
    assert sorted(itertools.chain(*batches), key=exchanges.index) == exchanges
    assert all(sum(one.num_targets for one in batch) <= 256 for batch in batches)
    spread = [max(map(_length, batch)) - min(map(_length, batch)) for batch in batches]
    assert max(spread) <= 60
    assert batches != epoch_batches(exchanges, 256, random.Random(2))


def _length(exchange: Exchange) -> int:
    return len(exchange.token_ids)


def test_long_prompts_make_smaller_batches() -> None:
    batches = epoch_batches([_exchange(200, 3) for _ in range(40)], 64, random.Random(0))
    assert max(sum(map(_length, batch)) for batch in batches) <= MAX_TOKENS_PER_TARGET * 64


def test_a_batch_is_split_into_parts_that_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches_module, "MAX_TOKENS_PER_PASS", 300)
    exchanges = _some(50)
    parts = split(exchanges)
    assert sorted(itertools.chain(*parts), key=exchanges.index) == exchanges
    assert len(parts) > 5
    assert all(len(part) * max(map(_length, part)) <= 300 for part in parts)


def test_an_exchange_larger_than_a_batch_stands_alone() -> None:
    assert [len(batch) for batch in epoch_batches([_exchange(9, 90)] * 3, 16, random.Random(0))] == [1, 1, 1]


@pytest.mark.parametrize("step", [0, 1, 7, 40])
def test_batches_from_a_step_are_those_of_the_whole_run(step: int) -> None:
    exchanges = _some(40)
    whole = list(itertools.islice(batches_from(0, exchanges, 128, seed=3), 60))
    rest = list(itertools.islice(batches_from(step, exchanges, 128, seed=3), 60 - step))
    assert rest == whole[step:]
    assert whole != list(itertools.islice(batches_from(0, exchanges, 128, seed=4), 60))
