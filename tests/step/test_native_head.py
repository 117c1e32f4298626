"""An MTP head that drafts in one native operation gives the drafts of its small operations, to the bit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from outrider.cache.embedding_cache import ImageInputs
from outrider.cache.placement import GridPositions, block_tables
from outrider.cache.ragged_kv import RaggedKV
from outrider.cpu import draft_head
from outrider.cpu.extension import extension
from outrider.cpu.native_parts import NotFused
from outrider.cpu.threads import thread_counts
from outrider.models.heads import LoadedHead
from outrider.plan import BLOCK_SIZE, NUM_SPARE_BLOCKS
from outrider.request import SamplingParams
from outrider.sampling.sampler import Sampler
from outrider.step import mtp, native_head
from outrider.step.head_rows import Drafts, HeadRows
from outrider.step.mtp import MTPDrafter
from step.histories import World, world

pytestmark = pytest.mark.skipif(extension() is None, reason="no native extension: no compiler, or not Linux")

WORLDS = ("llama-4bit", "llama-8bit", "qwen3-mixed", "llama-mxfp4", "llama-4bit kv8", "llama-4bit kv16")
CAPACITY = 128
NUM_STEPS = 12
GREEDY = SamplingParams(temperature=0)
SAMPLED = SamplingParams(temperature=0.8, seed=5)
FILTERED = SamplingParams(temperature=1.1, seed=11, top_k=20, top_p=0.9)


@dataclass(frozen=True)
class Pair:
    """Two drafters with the same head."""

    native: MTPDrafter
    plain: MTPDrafter

    @classmethod
    def of(cls, tiny: World, head: LoadedHead) -> Pair:
        native = MTPDrafter(head, tiny.trunk)
        assert native._native is not None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mtp, "native_head_of", lambda *_: None)
            return cls(native, MTPDrafter(head, tiny.trunk))

    def draft(self, hidden: mx.array, next_ids: mx.array, rows: HeadRows) -> tuple[Drafts, Drafts] | None:
        found = [each.draft(hidden, next_ids, rows, CAPACITY) for each in (self.native, self.plain)]
        first, second = found
        if first is None or second is None:
            assert first is second
            assert rows.depth == 0
            return None
        return first, second

    def kv(self) -> list[RaggedKV]:
        return [kv for each in (self.native, self.plain) for kv in each.buffers() if isinstance(kv, RaggedKV)]


@pytest.fixture(scope="module", params=WORLDS)
def tiny(request: pytest.FixtureRequest) -> World:
    return world(request.param)


def loaded(tiny: World, size: str = "whole") -> LoadedHead:
    head = tiny.drafters[size]  # type: ignore[index]
    assert isinstance(head, LoadedHead)
    return head


class Rows:
    """Rows that the head follows for some steps: each feeds some pairs and keeps a part of them."""

    def __init__(self, tiny: World, pair: Pair, num_rows: int, in_blocks: bool, rng: random.Random) -> None:
        self.tiny, self.pair, self.rng = tiny, pair, rng
        self.ends = [0] * num_rows
        self.slots = rng.sample(range(num_rows + 1), num_rows)
        self.tables: mx.array | None = None
        per_row = CAPACITY // BLOCK_SIZE
        for kv in pair.kv():
            if in_blocks:
                kv.resize_blocks(NUM_SPARE_BLOCKS + num_rows * per_row, BLOCK_SIZE)
            else:
                kv.resize(num_rows + 1, CAPACITY)
        if in_blocks:
            places = rng.sample(
                range(NUM_SPARE_BLOCKS, NUM_SPARE_BLOCKS + num_rows * per_row), num_rows * per_row
            )
            self.tables = block_tables([places[i * per_row : (i + 1) * per_row] for i in range(num_rows)])

    def step(self, params: SamplingParams, depth: int, deltas: Sequence[int] = ()) -> list[list[int]]:
        """Compare the drafts of one step. Returns them."""
        rng, num_rows = self.rng, len(self.ends)
        num_fed = [rng.choice((1, 1, 2, 3, 9)) for _ in range(num_rows)]
        committed = [rng.randint(1, fed) for fed in num_fed]
        width = max(num_fed) + rng.choice((0, 0, 2))
        keys = mx.random.split(mx.random.key(rng.randrange(10**6)), 2)
        hidden = mx.random.normal((num_rows, width, self.tiny.trunk.hidden_size), key=keys[0])
        next_ids = mx.random.randint(0, self.tiny.vocab_size, (num_rows, width), key=keys[1])
        starts = mx.array(self.ends)
        rows = HeadRows(
            slots=self.slots,
            starts=starts,
            num_fed=mx.array(num_fed),
            num_committed=mx.array(committed),
            end=max(end + fed for end, fed in zip(self.ends, num_fed, strict=True)),
            sampler=Sampler.of(
                [replace(params, seed=params.seed and params.seed + i) for i in range(num_rows)]
            ),
            depth=depth,
            positions=starts + mx.array(deltas) if deltas else None,
            position_deltas=mx.array(deltas) if deltas else None,
            with_margins=True,
            tables=self.tables,
            block_size=BLOCK_SIZE if self.tables is not None else 0,
        )
        both = self.pair.draft(hidden, next_ids, rows)
        self.ends = [end + num for end, num in zip(self.ends, committed, strict=True)]
        if both is None:
            return []
        native, plain = both
        assert native.token_ids.tolist() == plain.token_ids.tolist()
        assert native.margins is not None
        assert plain.margins is not None
        assert native.margins.tolist() == plain.margins.tolist()
        return native.token_ids.tolist()


@pytest.mark.parametrize("in_blocks", [False, True], ids=["slots", "blocks"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED, FILTERED], ids=["greedy", "sampled", "filtered"])
@pytest.mark.parametrize("size", ["whole", "reduced"])
def test_drafts_and_margins_are_those_of_the_small_operations(
    tiny: World, size: str, params: SamplingParams, in_blocks: bool
) -> None:
    rng = random.Random(f"{size} {params.temperature} {in_blocks}")
    rows = Rows(tiny, Pair.of(tiny, loaded(tiny, size)), rng.randint(1, 5), in_blocks, rng)
    drafts = [rows.step(params, rng.choice((0, 1, 2, 3, 5))) for _ in range(NUM_STEPS)]
    assert any(drafts)


def test_rows_with_other_positions_than_cells(tiny: World) -> None:
    rows = Rows(tiny, Pair.of(tiny, loaded(tiny)), 3, False, random.Random(3))
    for _ in range(NUM_STEPS):
        rows.step(GREEDY, 2, deltas=(0, 7, -2))


def test_committed_cells_are_those_of_the_small_operations(tiny: World) -> None:
    rows = Rows(tiny, Pair.of(tiny, loaded(tiny)), 3, False, random.Random(4))
    for depth in (2, 0, 3, 1):
        rows.step(GREEDY, depth)
    native, plain = rows.pair.kv()
    for slot, end in zip(rows.slots, rows.ends, strict=True):
        for found, expected in zip(native.arrays(), plain.arrays(), strict=True):
            assert mx.array_equal(found[slot, :, :end], expected[slot, :, :end]).item()


def test_the_cells_are_written_in_place(tiny: World) -> None:
    native = extension()
    assert native is not None
    both = Pair(*(MTPDrafter(loaded(tiny), tiny.trunk) for _ in range(2)))
    rows = Rows(tiny, both, 2, False, random.Random(5))
    rows.step(GREEDY, 2)
    before = native.num_buffer_copies()
    for _ in range(3):
        rows.step(GREEDY, 2)
    assert native.num_buffer_copies() == before


def test_drafts_do_not_depend_on_the_number_of_threads() -> None:
    tiny = world("llama-4bit")
    native = extension()
    assert native is not None
    found = {}
    try:
        for num_threads in (1, 2, 3):
            native.set_num_threads(num_threads)
            rows = Rows(tiny, Pair.of(tiny, loaded(tiny)), 5, False, random.Random(6))
            found[num_threads] = [rows.step(GREEDY, 3) for _ in range(NUM_STEPS)]
    finally:
        native.set_num_threads(thread_counts({}).max)
    assert found[1] == found[2] == found[3]


# -- who drafts operation by operation -------------------------------------------------------------------


def some_rows(tiny: World, *params: SamplingParams, **changes: Any) -> HeadRows:
    num = len(params)
    rows = HeadRows(
        slots=range(num),
        starts=mx.zeros(num, mx.int32),
        num_fed=mx.ones(num, mx.int32),
        num_committed=mx.ones(num, mx.int32),
        end=1,
        sampler=Sampler.of(params),
        depth=1,
    )
    return replace(rows, **changes)


def test_passes_that_the_operation_does_not_take() -> None:
    tiny = world("llama-4bit")
    own = MTPDrafter(loaded(tiny), tiny.trunk)._native
    assert own is not None
    hidden = mx.zeros((2, 1, tiny.trunk.hidden_size))
    images = ImageInputs(mx.array([0]), mx.array([0]), hidden[:1, 0])
    grid = GridPositions(mx.zeros((3, 2, 1), mx.int32))
    assert own.can_draft(hidden, some_rows(tiny, GREEDY, GREEDY))
    assert own.can_draft(hidden, some_rows(tiny, SAMPLED, SAMPLED))
    assert not own.can_draft(hidden.astype(mx.bfloat16), some_rows(tiny, GREEDY, GREEDY))
    assert not own.can_draft(hidden, some_rows(tiny, GREEDY, SAMPLED))  # rows of two kinds
    assert not own.can_draft(hidden, some_rows(tiny, GREEDY, GREEDY, images=images))
    assert not own.can_draft(hidden, some_rows(tiny, GREEDY, GREEDY, positions=grid))
    assert not own.can_draft(hidden, some_rows(tiny, GREEDY, GREEDY, sampler=None))  # another rank


def test_steps_with_and_without_the_operation_use_the_same_cells(tiny: World) -> None:
    pair = Pair.of(tiny, loaded(tiny))
    rows = Rows(tiny, pair, 3, False, random.Random(8))
    for turn in range(NUM_STEPS):
        if turn % 2:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(native_head.NativeHead, "can_draft", lambda *_: False)
                rows.step(GREEDY, 2)
        else:
            rows.step(GREEDY, 2)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3-4bit"])  # float32, and a layer that is not fused
def test_heads_that_the_operation_does_not_compute(name: str) -> None:
    tiny = world(name)
    assert MTPDrafter(loaded(tiny), tiny.trunk)._native is None


def test_a_layer_in_float32_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = world("llama-4bit")
    size = tiny.trunk.hidden_size
    monkeypatch.setitem(tiny.head, "fc", nn.Linear(2 * size, size, bias=False))
    with pytest.raises(NotFused, match="a projection is a Linear"):
        draft_head.native_draft_head(tiny.head, tiny.trunk.embedding, tiny.trunk.output, None)


def test_an_operation_with_other_drafts_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tiny = world("llama-4bit")
    made = draft_head.native_draft_head

    def reversed_ids(head: Any, embedding: Any, projection: Any, token_ids: Any) -> Any:
        return made(head, embedding, projection, mx.arange(tiny.vocab_size)[::-1])

    monkeypatch.setattr(native_head, "native_draft_head", reversed_ids)
    assert MTPDrafter(loaded(tiny), tiny.trunk)._native is None
    assert "other drafts" in caplog.text
