"""Heads with a layer for each depth: drafts are those of a text images whole, after any rejections."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from models.head_checkpoints import TinyHead, final_norm, projection, tiny_head, wide, write
from models.head_reference import head_pass
from outrider.models.heads import load_head
from outrider.request import SamplingParams
from outrider.sampling.sampler import Sampler
from outrider.step import mtp
from outrider.step.head_rows import HeadRows
from outrider.step.mtp import MTPDrafter
from tiny_models import VOCAB_SIZE

Array = np.ndarray
LENGTH = 40
UNCHAINED = "mimo_v2_flash"
STEPS = [  # pairs fed to each of three rows, pairs that it keeps, drafts wanted
    ([1, 7, 3], [1, 7, 3], 0),
    ([2, 2, 5], [2, 2, 5], 3),
    ([4, 4, 4], [1, 4, 2], 3),
    ([4, 3, 1], [1, 1, 1], 1),
    ([2, 2, 2], [2, 1, 2], 5),
    ([6, 6, 6], [1, 2, 6], 2),
    ([3, 3, 3], [1, 1, 1], 5),
]


class Text:
    """One row's tokens and what a trunk would have made of them."""

    def __init__(self, tiny: TinyHead, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self._tiny = tiny
        self.tokens = rng.integers(0, VOCAB_SIZE, LENGTH)
        self.hidden = rng.standard_normal((LENGTH, 64)).astype(np.float32)

    def drafts(self, end: int, depth: int) -> list[int]:
        """With `end` cells, and so x_0..x_end, known."""
        tiny, tokens = self._tiny, [int(x) for x in self.tokens[: end + 1]]
        outputs = given = self.hidden[:end].astype(np.float64)
        for number in range(depth):
            lag = min(number, len(tiny.depths) - 1)
            if 0 < number < len(tiny.depths):
                given = self.hidden[:end].astype(np.float64) if tiny.family == UNCHAINED else outputs
            elif number >= len(tiny.depths):
                given = np.concatenate([given, outputs[-1:]])
            outputs = self._pass(lag, given, tokens[lag + 1 : lag + 1 + len(given)])
            tokens.append(int((outputs[-1] @ projection(tiny.trunk).T).argmax()))
        return tokens[end + 1 :]

    def _pass(self, lag: int, hidden: Array, tokens: list[int]) -> Array:
        trunk = self._tiny.trunk
        embedded = np.array(trunk.embed(mx.array(tokens)), np.float64)
        weights = wide(self._tiny.depths[lag])
        return head_pass(self._tiny.family, weights, hidden, embedded, final_norm(trunk))


def _drafter(tiny: TinyHead, folder: Path) -> MTPDrafter:
    file = write(folder / "mtp.safetensors", tiny.published(), {"format": "pt"})
    head = load_head(file, tiny.trunk, config=tiny.config)
    assert len(head.layers) == len(tiny.depths)
    drafter = MTPDrafter(head, tiny.trunk)
    for buffers in drafter.buffers():
        buffers.resize(5, 64)
        for name in ("keys", "values"):
            shape = getattr(buffers, name).shape
            setattr(buffers, name, 1e3 * mx.random.normal(shape, key=mx.random.key(9)))
    return drafter


@pytest.mark.parametrize("min_wide", [1, 1000])  # the last layer's newest column always, and never, alone
@pytest.mark.parametrize(
    ("family", "num_depths"),
    [
        ("glm4_moe", 1),
        ("glm4_moe", 2),
        ("glm4_moe", 3),
        ("qwen3_5", 2),
        (UNCHAINED, 3),
        ("mimo", 2),
        ("deepseek_v3", 2),
        ("ernie4_5", 3),
        ("nemotron_h", 1),
    ],
)
def test_drafts_are_those_of_the_whole_text_after_any_rejections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, num_depths: int, min_wide: int
) -> None:
    monkeypatch.setattr(mtp, "MIN_WIDE", min_wide)
    tiny = tiny_head(family, num_depths)
    drafter = _drafter(tiny, tmp_path)
    texts = [Text(tiny, seed) for seed in range(3)]
    starts = np.zeros(3, np.int64)
    for fed, kept, depth in STEPS:
        drafts = drafter.draft(*_pairs(texts, starts, fed, kept), _rows(starts, fed, kept, depth), 64)
        starts = starts + kept
        if depth == 0:
            assert drafts is None
            continue
        assert drafts is not None
        want = [text.drafts(int(end), depth) for text, end in zip(texts, starts, strict=True)]
        assert drafts.token_ids.tolist() == want


@pytest.mark.parametrize("num_depths", [1, 3])
def test_drafts_with_margins_are_the_same(tmp_path: Path, num_depths: int) -> None:
    tiny = tiny_head("glm4_moe", num_depths)
    texts, starts = [Text(tiny, seed) for seed in range(3)], np.zeros(3, np.int64)
    pairs, rows = _pairs(texts, starts, [9, 9, 9], [9, 8, 7]), _rows(starts, [9, 9, 9], [9, 8, 7], 5)
    plain, found = (
        _drafter(tiny, tmp_path).draft(*pairs, replace(rows, with_margins=with_margins), 64)
        for with_margins in (False, True)
    )
    assert plain is not None
    assert found is not None
    assert plain.margins is None
    assert found.margins is not None
    assert mx.array_equal(plain.token_ids, found.token_ids)
    assert found.margins.shape == (3, 5)
    assert (np.array(found.margins) >= 0).all()


def test_layers_after_the_first_matter(tmp_path: Path) -> None:
    """The control of the test above."""
    tiny = tiny_head("glm4_moe", 2)
    text = Text(tiny, 1)
    other = Text(TinyHead(tiny.family, tiny.config, tiny.model, tiny.trunk, tiny.depths[:1]), 1)
    found = [(text.drafts(end, 3), other.drafts(end, 3)) for end in range(5, 30, 5)]
    assert all(a[0] == b[0] for a, b in found)
    assert any(a[1:] != b[1:] for a, b in found)


def _pairs(texts: list[Text], starts: Array, fed: list[int], kept: list[int]) -> tuple[mx.array, mx.array]:
    """The trunk's hidden states and the next tokens; both are something else where drafts were rejected."""
    width = max(fed)
    junk = np.random.default_rng(int(starts.sum()))
    hidden = junk.standard_normal((3, width, 64)).astype(np.float32)
    next_ids = junk.integers(0, VOCAB_SIZE, (3, width))
    for row, text in enumerate(texts):
        start, num = int(starts[row]), kept[row]
        hidden[row, :num] = text.hidden[start : start + num]
        next_ids[row, :num] = text.tokens[start + 1 : start + num + 1]
    return mx.array(hidden), mx.array(next_ids)


def _rows(starts: Array, fed: list[int], kept: list[int], depth: int) -> HeadRows:
    return HeadRows(
        slots=[4, 0, 2],
        starts=mx.array(starts, mx.int32),
        num_fed=mx.array(fed),
        num_committed=mx.array(kept),
        end=int((starts + fed).max()),
        sampler=Sampler.of([SamplingParams(temperature=0.0)] * 3),
        depth=depth,
    )
