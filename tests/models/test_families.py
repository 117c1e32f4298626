"""Every family: rows in one ragged batch equal rows that run alone, whatever happened to their neighbours."""

from __future__ import annotations

import pkgutil
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import cycle
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
import numpy as np
import pytest

from outrider.cache.recurrent import RecurrentState
from outrider.models.dtypes import settle_dtype
from outrider.models.families import REFUSED, SUPPORTED, UnsupportedModel, check_supported
from outrider.models.trunk import Trunk
from ragged_rows import RaggedRows, error, solo_logits
from tiny_models import (
    QUANTIZATIONS,
    REFUSED_TINY,
    SUMS_DEPEND_ON_WIDTH,
    TINY,
    VOCAB_SIZE,
    quantized_tiny_model,
    tiny_model,
)

TOLERANCE = 1e-5  # relative to the largest logit
RECURRENT_TOLERANCE = 1e-4  # a norm over small states magnifies the rounding of another order of sums
# MLX multiplies floats, the layers for CPUs tokens of 15 bits: at most 0.0007, however a family is quantised.
QUANTIZED_TOLERANCE = 0.002
# One step of these 15 bits, and what follows from it: 0.0008 at most in 72 histories.
BY_WIDTH_TOLERANCE = 0.003
TEXT = [(7 * i * i + 3 * i + 5) % VOCAB_SIZE for i in range(24)]
SHARED_PARTS = {  # modules of mlx_lm.models that are no family
    "activations", "base", "bitlinear_layers", "cache", "gated_delta", "mla", "pipeline", "rope_utils", "ssm",
    "switch_layers",
}  # fmt: skip
WINDOW_KEYS = ("sliding_window", "sliding_window_size", "loop_window_size", "index_topk")
WINDOWED = sorted((family, key) for family, own in TINY.items() for key in WINDOW_KEYS if key in own)


@pytest.fixture(autouse=True)
def _uncompiled() -> Iterator[None]:
    """Building each family's fused activations takes a minute on a fresh machine and is not under test."""
    mx.disable_compile()
    yield
    mx.enable_compile()


@cache
def _model(family: str) -> nn.Module:
    return tiny_model(family)


class History:
    """Rows whose texts are known from the start, fed piece by piece and compared with solo runs.

    `solo`: the logits of a text that runs alone.
    """

    def __init__(
        self, trunk: Trunk, solo: Callable[[list[int]], np.ndarray], seed: int, length: int = 96
    ) -> None:
        self.rng = random.Random(seed)
        self.texts = {row: [self.rng.randrange(VOCAB_SIZE) for _ in range(length)] for row in "abcd"}
        self.solo = {row: solo(text) for row, text in self.texts.items()}
        self.rows = RaggedRows(trunk, num_slots=6, capacity=24)
        self.rows.scribble()
        is_recurrent = any(isinstance(states, RecurrentState) for states in self.rows.cache.buffers())
        self.tolerance = RECURRENT_TOLERANCE if is_recurrent else TOLERANCE

    def join(self, row: str, slot: int) -> None:
        self.rows.join(row, slot)

    def prefill(self, lengths: Mapping[str, int]) -> None:
        """Bring the rows to these lengths, in chunks of random sizes."""
        while waiting := [row for row, length in lengths.items() if self.rows.starts[row] < length]:
            self.rng.shuffle(waiting)
            chunks = {
                row: min(self.rng.randint(1, 9), lengths[row] - self.rows.starts[row]) for row in waiting
            }
            self._feed(chunks, dict.fromkeys(waiting, 0))

    def decode(self, num_steps: int) -> None:
        """Steps in which each row keeps its own number of tokens and rejects its own number of drafts."""
        for step in range(num_steps):
            rows = self._in_slot_order() if step % 2 else self._shuffled()
            most = 4 if step % 3 else 1  # every third step is plain: one token a row
            kept = {row: self.rng.randint(1, most) for row in rows}
            self._feed(kept, {row: self.rng.randint(0, most) if most > 1 else 0 for row in rows})

    def _in_slot_order(self) -> Sequence[str]:
        return sorted(self.rows.slots, key=self.rows.slots.__getitem__)

    def _shuffled(self) -> Sequence[str]:
        return self.rng.sample(sorted(self.rows.slots), len(self.rows.slots))

    def _feed(self, kept: Mapping[str, int], rejected: Mapping[str, int]) -> None:
        starts = dict(self.rows.starts)
        fed = {row: self._own(row, num) + self._random_tokens(rejected[row]) for row, num in kept.items()}
        logits = self.rows.feed(fed, commits_all=not any(rejected.values()))
        for row, num in kept.items():
            want = self.solo[row][starts[row] : starts[row] + num]
            assert error(logits[row][:num], want) <= self.tolerance, f"row {row} at {starts[row]}"
            self.rows.roll_back(row, rejected[row])

    def _own(self, row: str, num: int) -> list[int]:
        start = self.rows.starts[row]
        return self.texts[row][start : start + num]

    def _random_tokens(self, num: int) -> list[int]:
        return [self.rng.randrange(VOCAB_SIZE) for _ in range(num)]


@pytest.mark.parametrize("family", sorted(SUPPORTED))
def test_batched_rows_equal_solo_rows_after_uneven_rollbacks(family: str) -> None:
    model = _model(family)
    history = History(Trunk(model, max_context=256), partial(solo_logits, model), seed=1)
    rows = history.rows
    for row, slot in zip("abc", (4, 1, 3), strict=True):
        history.join(row, slot)
    history.prefill({"a": 17, "b": 5, "c": 22})

    rows.resize(num_slots=6, capacity=64)
    history.decode(4)

    rows.exchange(4, 1)
    history.decode(3)

    rows.exchange(4, 2, one_way=True)
    rows.exchange(3, 0, one_way=True)
    rows.resize(
        num_slots=3, capacity=64
    )  # the rows now fill the slots: their buffers are read without a copy
    assert sorted(rows.slots.values()) == [0, 1, 2]
    history.decode(4)

    rows.resize(num_slots=5, capacity=112)
    history.join("d", slot=4)
    history.prefill({"a": 66, "d": 9})  # past the first view of 64 cells
    history.decode(4)


def _alone(trunk: Trunk, text: list[int]) -> np.ndarray:
    rows = RaggedRows(trunk, num_slots=1, capacity=len(text))
    rows.join("a", slot=0)
    return rows.feed({"a": text})["a"]


def _float32_rows(embedding: nn.QuantizedEmbedding, token_ids: mx.array) -> mx.array:
    weight, scales = embedding["weight"][token_ids], embedding["scales"][token_ids]
    biases = embedding["biases"][token_ids] if embedding.get("biases") is not None else None
    how = embedding.group_size, embedding.bits, embedding.mode
    return mx.dequantize(weight, scales, biases, *how, dtype=mx.float32)


SMALL_GROUPS = [
    how for how, one in QUANTIZATIONS.items() if one["group_size"] < 128
]  # these models are small


@pytest.mark.parametrize(
    "name", [f"{family}-{how}" for family, how in zip(sorted(SUPPORTED), cycle(SMALL_GROUPS), strict=False)]
)
def test_rows_of_a_quantised_model_are_the_same_to_the_bit_in_any_batch(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = quantized_tiny_model(name)
    # MLX's embeddings in mxfp4, mxfp8 and nvfp4 are bfloat16, and some models go on in it.
    monkeypatch.setattr(nn.QuantizedEmbedding, "__call__", _float32_rows)
    theirs = solo_logits(model, TEXT)
    settle_dtype(model, "auto")
    trunk = Trunk(model, max_context=256)
    trunk.prepare_for_serving()
    differences = np.abs(_alone(trunk, TEXT) - theirs).max(axis=1) / np.abs(theirs).max()
    # The median: a token whose best experts are about as good as others may go to the others.
    assert np.median(differences) < QUANTIZED_TOLERANCE
    history = History(trunk, partial(_alone, trunk), seed=1, length=40)
    history.tolerance = BY_WIDTH_TOLERANCE if name.rpartition("-")[0] in SUMS_DEPEND_ON_WIDTH else 0
    for row, slot in zip("abc", (4, 1, 3), strict=True):
        history.join(row, slot)
    history.prefill({"a": 17, "b": 5, "c": 22})
    history.rows.resize(num_slots=6, capacity=64)
    history.decode(3)


@pytest.mark.parametrize("family", sorted(SUPPORTED))
def test_a_start_that_is_off_by_one_shows(family: str) -> None:
    """The control of the test above: the comparison can fail."""
    text = list(range(5, 25))
    want = solo_logits(_model(family), text)
    rows = RaggedRows(Trunk(_model(family), max_context=256), num_slots=2, capacity=32)
    rows.join("a", slot=1)
    rows.feed({"a": text[:12]})
    rows.roll_back("a", 1)  # nothing was rejected
    assert error(rows.feed({"a": text[12:15]})["a"], want[12:15]) > 1e-2


@pytest.mark.parametrize(("family", "key"), WINDOWED)
def test_the_tiny_window_bites(family: str, key: str) -> None:
    text = list(range(40, 64))
    narrow, wide = solo_logits(_model(family), text), solo_logits(tiny_model(family, **{key: 1000}), text)
    assert error(narrow[:6], wide[:6]) <= TOLERANCE
    assert error(narrow[12:], wide[12:]) > 1e-3


def test_each_served_family_has_a_tiny_model() -> None:
    assert set(TINY) == SUPPORTED


def test_every_family_of_mlx_lm_is_served_or_refused() -> None:
    folder = Path(mlx_lm.models.__path__[0])
    modules = {module.name for module in pkgutil.iter_modules([str(folder)])} - SHARED_PARTS
    assert modules == SUPPORTED | REFUSED.keys()
    assert not SUPPORTED & REFUSED.keys()


@pytest.mark.parametrize("family", sorted(SUPPORTED))
def test_a_served_family_passes_the_check(family: str) -> None:
    check_supported(family)


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_a_refused_family_is_told_its_reason(family: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        check_supported(family)
    assert repr(family) in str(caught.value)
    assert REFUSED[family] in str(caught.value)


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="'brand_new' is not served: it has not been checked"):
        check_supported("brand_new")


@pytest.mark.parametrize("family", sorted(REFUSED_TINY))
def test_obstacles_are_noticed_without_the_table(family: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"'{family}' is not served"):
        Trunk(tiny_model(family), max_context=64)


def test_a_rope_that_depends_on_the_longest_row_is_refused() -> None:
    model = tiny_model("llama", rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    with pytest.raises(UnsupportedModel, match="rows of different lengths"):
        Trunk(model, max_context=64)


@pytest.mark.parametrize("family", sorted(SUPPORTED))
def test_a_tiny_model_is_the_same_each_time(family: str) -> None:
    text = list(range(12))
    np.testing.assert_array_equal(solo_logits(_model(family), text), solo_logits(tiny_model(family), text))


def test_a_solo_row_does_not_depend_on_what_comes_later() -> None:
    """What the comparisons rest on: one from-scratch pass is the reference for every shorter one."""
    model, text = _model("llama"), list(range(30))
    np.testing.assert_allclose(solo_logits(model, text)[:20], solo_logits(model, text[:20]), atol=1e-5)
