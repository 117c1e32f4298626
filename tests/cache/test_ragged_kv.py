"""The buffers by themselves, without a model: who writes where, and who sees what."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import gpu_kernels
from outrider.cache.placement import (
    MAX_GROUP_PADDING,
    VIEW_STEP,
    Placement,
    block_tables,
    grouped_by_length,
)
from outrider.cache.ragged_kv import KVSpec, LayerView, RaggedKV

SPEC = KVSpec(num_heads=2, key_dim=3, value_dim=5, dtype=mx.float32)


def _place(
    slots: list[int], starts: list[int], num_fed: list[int], capacity: int, width: int | None = None
) -> Placement:
    end = max(start + num for start, num in zip(starts, num_fed, strict=True))
    return Placement(slots, mx.array(starts), mx.array(num_fed), width or max(num_fed), end, capacity)


def _cells(numbers: list[list[float]], dim: int) -> mx.array:
    """One number a fed cell, spread over heads and dimensions.  [rows, width] -> [rows, 2, width, dim]"""
    cells = mx.array(numbers)[:, None, :, None] + 1000.0 * mx.arange(SPEC.num_heads)[None, :, None, None]
    return mx.broadcast_to(cells, (*cells.shape[:3], dim))


def _feed(kv: RaggedKV, place: Placement, numbers: list[list[float]]) -> tuple[mx.array, mx.array]:
    return LayerView(kv, place).update_and_fetch(_cells(numbers, 3), -_cells(numbers, 5))


def _buffer(num_slots: int, capacity: int) -> RaggedKV:
    kv = RaggedKV(SPEC)
    kv.resize(num_slots, capacity)
    return kv


def _numbers(kv: RaggedKV, slot: int) -> list[float]:
    """The numbers that a slot's cells hold, the spare cell left out."""
    keys, values = np.array(kv.keys[slot, :, :-1]), np.array(kv.values[slot, :, :-1])
    assert np.all(keys == keys[..., :1])
    assert np.all(keys[1] - keys[0] == np.where(keys[0] == 0, 0, 1000.0))
    assert np.all(values == -keys[..., :1])
    return keys[0, :, 0].tolist()


def test_each_row_writes_at_its_own_start() -> None:
    kv = _buffer(3, 4)
    _feed(kv, _place([2, 0], [1, 2], [2, 1], capacity=4), [[5, 6], [7, 99]])
    assert _numbers(kv, 2) == [0, 5, 6, 0]
    assert _numbers(kv, 0) == [0, 0, 7, 0]
    assert _numbers(kv, 1) == [0, 0, 0, 0]


def test_padding_goes_to_the_spare_cell_even_in_a_full_row() -> None:
    kv = _buffer(2, 3)
    _feed(kv, _place([0, 1], [0, 0], [3, 3], capacity=3), [[1, 2, 3], [4, 5, 6]])
    _feed(kv, _place([0, 1], [2, 0], [1, 3], capacity=3), [[9, 98, 97], [4, 5, 6]])
    assert _numbers(kv, 0) == [1, 2, 9]
    assert _numbers(kv, 1) == [4, 5, 6]


def test_a_row_that_runs_over_writes_to_the_spare_cell() -> None:
    """A head that recurses deeper than one row's own depth goes past that row's capacity."""
    kv = _buffer(2, 3)
    _feed(kv, _place([0, 1], [0, 0], [3, 3], capacity=3), [[1, 2, 3], [4, 5, 6]])
    place = Placement([0, 1], mx.array([4, 1]), mx.array([1, 1]), 1, end=3, capacity=3)
    _feed(kv, place, [[97], [8]])
    assert _numbers(kv, 0) == [1, 2, 3]
    assert _numbers(kv, 1) == [4, 8, 6]


def test_a_row_that_needs_more_cells_than_there_are_is_an_error() -> None:
    with pytest.raises(ValueError, match="5 cells where the buffers have 4"):
        _place([0], [3], [2], capacity=4)


@pytest.mark.parametrize("slots", [[1, 2, 3], [3, 1, 2], [0, 2, 3], [2]])
def test_rows_are_read_in_their_own_order(slots: list[int]) -> None:
    kv = _buffer(4, 4)
    _feed(kv, _place([0, 1, 2, 3], [0] * 4, [1] * 4, capacity=4), [[10], [11], [12], [13]])
    place = _place(slots, [1] * len(slots), [1] * len(slots), capacity=4)
    keys, values = _feed(kv, place, [[20 + slot] for slot in slots])
    assert keys[:, 0, :2, 0].tolist() == [[10 + slot, 20 + slot] for slot in slots]
    assert values.shape == (len(slots), SPEC.num_heads, 4, SPEC.value_dim)


def test_neighbouring_slots_in_order_are_read_without_a_copy() -> None:
    assert _place([1, 2, 3], [0] * 3, [1] * 3, capacity=4).is_range
    assert not _place([1, 3], [0] * 2, [1] * 2, capacity=4).is_range
    assert not _place([2, 1], [0] * 2, [1] * 2, capacity=4).is_range


@pytest.mark.parametrize(
    ("end", "capacity", "seen"), [(1, 256, 16), (16, 256, 16), (17, 256, 32), (18, 20, 20)]
)
def test_the_view_grows_in_steps_up_to_the_capacity(end: int, capacity: int, seen: int) -> None:
    assert VIEW_STEP == 16
    assert _place([0], [end - 1], [1], capacity).num_attended == seen


@given(
    starts=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    width=st.integers(1, 5),
    window=st.none() | st.integers(1, 6),
)
@settings(max_examples=50, deadline=None)
def test_a_token_sees_its_own_past_and_itself(starts: list[int], width: int, window: int | None) -> None:
    place = _place(list(range(len(starts))), starts, [width] * len(starts), capacity=20)
    got = np.array(place.mask(window))
    assert got.shape == (len(starts), 1, width, place.num_attended)
    for row, start in enumerate(starts):
        for column in range(width):
            own = start + column
            oldest = 0 if window is None else max(0, own - window + 1)
            seen = [oldest <= cell <= own for cell in range(place.num_attended)]
            assert got[row, 0, column].tolist() == seen


def test_the_window_of_a_layer_is_used_unless_the_model_names_one() -> None:
    kv = RaggedKV(KVSpec(2, 3, 5, mx.float32, window=2))
    kv.resize(1, 8)
    view = LayerView(kv, _place([0], [5], [1], capacity=8))
    assert int(view.make_mask(1).sum().item()) == 2
    assert int(view.make_mask(1, window_size=3).sum().item()) == 3


def test_masks_are_shared_between_layers_but_not_between_windows() -> None:
    place = _place([0], [5], [1], capacity=8)
    assert place.mask(None) is place.mask(None)
    assert place.mask(2) is not place.mask(3)


def test_resize_keeps_every_cell_that_still_has_a_place() -> None:
    kv = _buffer(2, 2)
    _feed(kv, _place([0, 1], [0, 0], [2, 2], capacity=2), [[1, 2], [3, 4]])
    kv.resize(3, 4)
    assert [_numbers(kv, slot)[:2] for slot in range(2)] == [[1, 2], [3, 4]]
    kv.resize(1, 4)
    assert _numbers(kv, 0)[:2] == [1, 2]
    kv.resize(0, 0)
    assert kv.num_bytes == 0


def test_bytes_accounted_are_bytes_held() -> None:
    kv = _buffer(3, 7)
    cells = 3 * (7 + 1)
    assert kv.num_bytes == cells * SPEC.bytes_per_cell == kv.keys.nbytes + kv.values.nbytes


def test_exchange_swaps_two_slots() -> None:
    kv = _buffer(3, 2)
    _feed(kv, _place([0, 1, 2], [0] * 3, [2] * 3, capacity=2), [[1, 2], [3, 4], [5, 6]])
    kv.exchange(0, 2, one_way=False)
    assert [_numbers(kv, slot) for slot in range(3)] == [[5, 6], [3, 4], [1, 2]]


def test_a_one_way_exchange_leaves_the_other_slots_alone() -> None:
    kv = _buffer(3, 2)
    _feed(kv, _place([0, 1, 2], [0] * 3, [2] * 3, capacity=2), [[1, 2], [3, 4], [5, 6]])
    kv.exchange(2, 0, one_way=True)
    assert [_numbers(kv, slot) for slot in (0, 1)] == [[5, 6], [3, 4]]


_STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("feed"),
            st.permutations(range(4)),
            st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4)), min_size=1, max_size=4),
        ),
        st.tuples(st.just("exchange"), st.integers(0, 3), st.integers(0, 3)),
        st.tuples(st.just("grow"), st.integers(1, 9), st.just(0)),
    ),
    max_size=12,
)


@given(steps=_STEPS)
@settings(max_examples=40, deadline=None)
def test_any_history_leaves_each_row_with_its_own_cells(steps: list[tuple]) -> None:
    """Feeding (after giving up some cells), exchanging and growing, in any order."""
    capacity, count = 6, 0
    kv = _buffer(4, capacity)
    rows: list[list[float]] = [[] for _ in range(4)]  # the plainest ragged buffer: one list a slot
    for kind, first, second in steps:
        if kind == "grow":
            capacity += first
            kv.resize(4, capacity)
        elif kind == "exchange" and first != second:
            kv.exchange(first, second, one_way=False)
            rows[first], rows[second] = rows[second], rows[first]
        elif kind == "feed":
            slots = list(first[: len(second)])
            for slot, (num_rejected, _) in zip(slots, second, strict=True):
                del rows[slot][max(0, len(rows[slot]) - num_rejected) :]
            starts = [len(rows[slot]) for slot in slots]
            num_fed = [num for _, num in second]
            if max(start + num for start, num in zip(starts, num_fed, strict=True)) > capacity:
                continue
            width = max(num_fed)
            numbers = [[float(count + 10 * row + column + 1) for column in range(width)] for row in range(4)]
            count += 50
            for slot, num, new in zip(slots, num_fed, numbers, strict=False):
                rows[slot] += new[:num]
            place = _place(slots, starts, num_fed, capacity)
            keys, values = _feed(kv, place, numbers[: len(slots)])
            for row, slot in enumerate(slots):
                length = len(rows[slot])
                assert keys[row, 0, :length, 0].tolist() == rows[slot]
                assert values[row, 0, :length, 0].tolist() == [-number for number in rows[slot]]
    for slot, cells in enumerate(rows):
        assert _numbers(kv, slot)[: len(cells)] == cells


@pytest.mark.parametrize("launches", [True, False])
def test_only_passes_that_are_not_traced_launch_layers(
    launches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[mx.array] = []
    monkeypatch.setattr(mx, "async_eval", lambda *arrays: launched.extend(arrays))
    place = Placement([0], mx.array([0]), mx.array([1]), 1, 1, capacity=4, launches=launches)
    _feed(_buffer(1, 4), place, [[1]])
    assert not launched
    _feed(_buffer(1, 4), place, [[1]])
    assert bool(launched) == launches


# -- cells in blocks -----------------------------------------------------------------------------------------

SIZE = 4  # cells of a block


def _blocks(num: int) -> RaggedKV:
    kv = RaggedKV(SPEC)
    kv.resize_blocks(num, SIZE)
    return kv


def _placed(
    tables: list[list[int]], starts: list[int], num_fed: list[int], ends: list[int] | None = None
) -> Placement:
    end = max(start + num for start, num in zip(starts, num_fed, strict=True))
    return Placement(
        list(range(len(starts))),
        mx.array(starts),
        mx.array(num_fed),
        max(num_fed),
        end,
        0,
        tables=block_tables(tables),
        block_size=SIZE,
        ends=ends,
    )


@pytest.fixture(params=["CPU", "GPU"])
def each_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are written by another operation on GPUs."""
    monkeypatch.setattr(gpu_kernels, "is_available", lambda: request.param == "GPU")


@pytest.mark.usefixtures("each_device")
def test_a_row_writes_and_reads_its_own_blocks() -> None:
    kv = _blocks(8)
    _feed(kv, _placed([[5, 2], [7]], [0, 0], [6, 2]), [[1, 2, 3, 4, 5, 6], [11, 12, 99, 99, 99, 99]])
    keys, values = _feed(kv, _placed([[5, 2], [7]], [6, 2], [1, 1]), [[7], [13]])
    assert keys.shape == (2, 2, 8, 3)
    assert keys[0, 0, :7, 0].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert keys[1, 0, :3, 0].tolist() == [11, 12, 13]
    assert values[0, 0, :7, 0].tolist() == [-1, -2, -3, -4, -5, -6, -7]
    assert not mx.any(kv.keys[mx.array([3, 4, 6])]), "blocks of nobody"


@pytest.mark.usefixtures("each_device")
def test_padding_and_tokens_past_a_rows_blocks_reach_no_row() -> None:
    kv = _blocks(5)
    _feed(kv, _placed([[2, 4], [3]], [0, 3], [1, 4]), [[1, 90, 90, 90], [4, 91, 92, 93]])
    assert not mx.any(kv.keys[4])
    assert kv.keys[2, 0, :, 0].tolist() == [1, 0, 0, 0]
    assert kv.keys[3, 0, :, 0].tolist() == [0, 0, 0, 4]
    assert not mx.any(kv.keys[0]), "the block of zeros stands for all blocks that a row does not have"


def test_rows_read_a_block_that_they_share() -> None:
    kv = _blocks(6)
    _feed(kv, _placed([[2, 3]], [0], [5]), [[1, 2, 3, 4, 5]])
    keys, _ = _feed(kv, _placed([[2, 3], [2, 4]], [5, 4], [1, 1]), [[6], [50]])
    assert keys[0, 0, :6, 0].tolist() == [1, 2, 3, 4, 5, 6]
    assert keys[1, 0, :5, 0].tolist() == [1, 2, 3, 4, 50]


def test_blocks_that_stay_get_their_new_numbers() -> None:
    kv = _blocks(6)
    _feed(kv, _placed([[4, 2]], [0], [8]), [[1, 2, 3, 4, 5, 6, 7, 8]])
    kv.resize_blocks(8, SIZE)
    assert kv.keys.shape[0] == 8
    kv.resize_blocks(5, SIZE, kept=(0, 1, 4, 2))
    assert kv.keys[mx.array([2, 3]), 0, :, 0].tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert not mx.any(kv.keys[4])
    kv.resize_blocks(0, SIZE)
    assert kv.num_bytes == 0


@pytest.mark.parametrize(
    ("lengths", "groups"),
    [
        ([300, 310, 290], [[0, 1, 2]]),
        ([100, 6000, 50, 90], [[1], [0, 2, 3]]),
        ([4000, 5000, 5900, 6000, 10], [[2, 3, 1], [0], [4]]),
        ([7], [[0]]),
    ],
)
def test_rows_of_about_the_same_length_attend_together(lengths: list[int], groups: list[list[int]]) -> None:
    assert grouped_by_length(lengths) == [sorted(rows) for rows in groups]


@given(st.lists(st.integers(1, 50_000), min_size=1, max_size=32))
@settings(max_examples=100, deadline=None)
def test_attention_reads_hardly_more_than_each_rows_cells(lengths: list[int]) -> None:
    groups = grouped_by_length(lengths)
    assert sorted(row for rows in groups for row in rows) == list(range(len(lengths)))
    read = sum(len(rows) * max(lengths[row] for row in rows) for rows in groups)
    assert read <= 1.25 * sum(lengths) + MAX_GROUP_PADDING * len(lengths)


@pytest.mark.parametrize("has_blocks", [True, False])
def test_a_group_reads_the_cells_of_its_rows(has_blocks: bool) -> None:
    starts, tables = [600, 3, 590], [list(range(2, 155)), [155], list(range(160, 315))]
    ends = [start + 1 for start in starts]
    if has_blocks:
        kv, place = _blocks(320), _placed(tables, starts, [1, 1, 1], ends)
    else:
        kv = _buffer(3, 608)
        place = Placement([0, 1, 2], mx.array(starts), mx.array([1, 1, 1]), 1, 601, 608, ends=ends)
    kv.keys, kv.values = mx.random.normal(kv.keys.shape), mx.random.normal(kv.values.shape)
    view = LayerView(kv, place)
    keys, values = view.update_and_fetch(mx.ones((3, 2, 1, 3)), mx.ones((3, 2, 1, 5)))
    found = view.groups(keys, values, view.make_mask(1))
    assert [rows.tolist() for rows, _, _ in found] == [[0, 2], [1]]
    for rows, own, mask in found:
        own_keys, own_values = own.read()
        num = own.placement.num_attended
        assert num < 20 or len(rows.tolist()) == 2
        assert mx.array_equal(own_keys, keys[rows, :, :num])
        assert mx.array_equal(own_values, values[rows, :, :num])
        assert mx.array_equal(mask, view.make_mask(1)[rows, ..., :num])
    assert not view.groups(keys + 0, values, view.make_mask(1)), (
        "a model that looks into its keys gets all of them"
    )
    assert not view.groups(keys, values + 0, view.make_mask(1))
    assert not view.groups(keys, values, view.make_mask(1) & True)
