"""Blocks copied out of slots and back, byte for byte, without keeping or copying the buffers."""

from __future__ import annotations

import gc
import random

import mlx.core as mx
import numpy as np
import pytest

from outrider.cache import prefix_store
from outrider.cache.block_file import read_block_file, write_block_file
from outrider.cache.prefix_index import PrefixIndex
from outrider.cache.prefix_store import PrefixStore
from outrider.cache.ragged_kv import KVSpec, RaggedKV
from outrider.cache.recurrent import RecurrentState, StateSpec
from outrider.plan import BlockPiece, SaveCells

SPECS = (
    KVSpec(2, 4, 4, mx.float32),
    KVSpec(2, 4, 4, mx.float32, window=3),
    KVSpec(1, 6, 3, mx.float32),  # latent attention: other shapes
    KVSpec(2, 4, 4, mx.bfloat16),
    KVSpec(2, 4, 4, mx.float16),
)


def _buffers(num_slots: int = 3, capacity: int = 32, specs: tuple[KVSpec, ...] = SPECS) -> list[RaggedKV]:
    """Every cell has a value of its own."""
    buffers = []
    for i, spec in enumerate(specs):
        kv = RaggedKV(spec)
        kv.resize(num_slots, capacity)
        kv.keys = mx.random.normal(kv.keys.shape, key=mx.random.key(2 * i)).astype(spec.dtype)
        kv.values = mx.random.normal(kv.values.shape, key=mx.random.key(2 * i + 1)).astype(spec.dtype)
        mx.eval(kv.keys, kv.values)
        buffers.append(kv)
    return buffers


def _cells(buffers: list[RaggedKV], slot: int, start: int, end: int) -> list[np.ndarray]:
    arrays = [x[slot, :, start:end] for kv in buffers for x in (kv.keys, kv.values)]
    return [np.array(x.astype(mx.float32)) for x in arrays]


def _same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(one, other, strict=True))


def _save(store: PrefixStore, block_id: int, slot: int, start: int, end: int) -> None:
    store.save_blocks([SaveCells(block_id, slot, start, end)])
    store.settle([block_id])


def test_what_is_saved_from_one_slot_is_loaded_into_another() -> None:
    buffers = _buffers()
    store = PrefixStore(buffers)
    wanted = _cells(buffers, 0, 0, 14)
    before, after = _cells(buffers, 2, 0, 3), _cells(buffers, 2, 13, 32)
    others = _cells(buffers, 1, 0, 32)
    _save(store, 1, slot=0, start=0, end=8)
    _save(store, 2, slot=0, start=8, end=14)
    store.load_blocks(2, 3, [BlockPiece(1, 3, 8), BlockPiece(2, 0, 5)])
    assert _same(_cells(buffers, 2, 3, 13), [x[:, 3:13] for x in wanted])
    assert _same(_cells(buffers, 2, 0, 3), before)
    assert _same(_cells(buffers, 2, 13, 32), after)
    assert _same(_cells(buffers, 1, 0, 32), others)
    assert _same(_cells(buffers, 0, 0, 14), wanted)


@pytest.mark.parametrize("specs", [SPECS, SPECS[:1], SPECS[2:3]])
def test_a_block_is_a_copy_and_keeps_no_buffer(specs: tuple[KVSpec, ...]) -> None:
    buffers = _buffers(capacity=4096, specs=specs)
    store = PrefixStore(buffers)
    wanted = _cells(buffers, 0, 0, 8)
    gc.collect()  # what other tests left
    before = mx.get_active_memory()
    _save(store, 1, 0, 0, 8)
    grown = mx.get_active_memory() - before
    assert store.num_bytes <= grown <= store.num_bytes + 4096 * len(specs)
    for kv in buffers:  # the row goes on; a buffer that something else holds would be copied
        kv.keys[0, :, :8] = mx.zeros((kv.spec.num_heads, 8, kv.spec.key_dim), kv.spec.dtype)
        kv.values[0, :, :8] = mx.zeros((kv.spec.num_heads, 8, kv.spec.value_dim), kv.spec.dtype)
        mx.eval(kv.keys, kv.values)
    assert mx.get_active_memory() - before == grown
    store.load_blocks(1, 0, [BlockPiece(1, 0, 8)])
    assert _same(_cells(buffers, 1, 0, 8), wanted)


@pytest.mark.parametrize("specs", [SPECS, SPECS[2:3]])
def test_blocks_saved_together_are_each_their_own(specs: tuple[KVSpec, ...]) -> None:
    buffers = _buffers(specs=specs)
    store = PrefixStore(buffers)
    wanted = _cells(buffers, 0, 3, 29)
    gc.collect()  # what other tests left
    before = mx.get_active_memory()
    store.save_blocks([SaveCells(1, 0, 3, 11), SaveCells(2, 0, 11, 19), SaveCells(3, 0, 19, 29)])
    store.settle([1, 2, 3])
    store.load_blocks(1, 0, [BlockPiece(1, 0, 8), BlockPiece(2, 0, 8), BlockPiece(3, 0, 10)])
    assert _same(_cells(buffers, 1, 0, 26), wanted)
    held = mx.get_active_memory() - before
    store.drop([1, 3])
    assert mx.get_active_memory() - before < 0.7 * held, "one block does not keep the others"


def test_loading_does_not_change_the_block_nor_keep_the_buffer() -> None:
    buffers = _buffers(capacity=4096)
    store = PrefixStore(buffers)
    wanted = _cells(buffers, 0, 0, 8)
    _save(store, 1, 0, 0, 8)
    gc.collect()  # what other tests left
    before = mx.get_active_memory()
    for slot in (1, 2):
        store.load_blocks(slot, 0, [BlockPiece(1, 0, 8)])
        mx.eval([x for kv in buffers for x in (kv.keys, kv.values)])
        assert mx.get_active_memory() == before
        for kv in buffers:
            kv.keys[slot, :, 0] = mx.ones((kv.spec.num_heads, kv.spec.key_dim), kv.spec.dtype)
    store.load_blocks(1, 0, [BlockPiece(1, 0, 8)])
    assert _same(_cells(buffers, 1, 0, 8), wanted)


def test_bytes_held_are_those_of_the_cells() -> None:
    buffers = _buffers()
    store = PrefixStore(buffers)
    per_cell = sum(kv.spec.bytes_per_cell for kv in buffers)
    _save(store, 1, 0, 0, 8)
    _save(store, 2, 0, 8, 11)
    assert store.num_bytes == 11 * per_cell
    store.drop([1, 99])
    assert store.num_bytes == 3 * per_cell
    store.clear()
    assert store.num_bytes == 0


def test_a_block_goes_through_a_file_unchanged(tmp_path) -> None:
    buffers = _buffers()
    store = PrefixStore(buffers)
    wanted = _cells(buffers, 0, 4, 12)
    _save(store, 1, 0, 4, 12)
    write_block_file(tmp_path / "file", {}, store.to_host(1), b"key")
    other = _buffers()
    reader = PrefixStore(other)
    reader.from_host(7, read_block_file(tmp_path / "file", {}, b"key"))
    assert reader.num_bytes == store.num_bytes
    reader.load_blocks(2, 0, [BlockPiece(7, 0, 8)])
    assert _same(_cells(other, 2, 0, 8), wanted)


def _states() -> RecurrentState:
    """Two parts a slot."""
    state = RecurrentState(StateSpec(((4, 2), (5,)), (mx.float32, mx.bfloat16)))
    state.parts = [mx.random.normal((3, 4, 2)), mx.random.normal((3, 5)).astype(mx.bfloat16)]
    mx.eval(state.parts)
    return state


def _row(states: list[RecurrentState], slot: int) -> list[np.ndarray]:
    return [np.array(part[slot].astype(mx.float32)) for state in states for part in state.parts]


def test_states_are_copied_like_cells() -> None:
    states = [_states(), _states()]
    store = PrefixStore([*_buffers(), *states])
    wanted = _row(states, 0)
    store.save_state(1, 0)
    store.settle([1])
    for state in states:
        state.parts = [mx.zeros_like(part) for part in state.parts]
    store.from_host(2, store.to_host(1))
    for slot, state_id in ((1, 1), (2, 2)):
        store.load_state(state_id, slot)
        assert _same(_row(states, slot), wanted)
        assert _same(_row(states, 0), [np.zeros_like(x) for x in wanted])
    assert store.num_bytes == 2 * sum(state.spec.bytes_per_slot for state in states)


def test_index_and_store_agree_on_every_byte_of_any_history() -> None:
    """The real store behind the index: what is held is what is accounted, and never more than the budget."""
    buffers = _buffers(capacity=64)
    per_cell = sum(kv.spec.bytes_per_cell for kv in buffers)
    rng = random.Random(1)
    budget = 40 * per_cell
    index, store = PrefixIndex(budget, per_cell, block_size=8), PrefixStore(buffers)
    num_evicted = 0
    for _ in range(150):
        text = [rng.randrange(2) for _ in range(rng.randint(1, 40))]
        node, slot, saves = index.root(""), rng.randrange(3), []
        for start in range(0, len(text), 8):
            keys = tuple(text[start : start + 8])
            child = index.child(node, keys)
            if child is None and (child := index.insert(node, keys)) is not None:
                saves.append((child.block_id, slot, start, start + len(keys)))
            if child is None or len(child.keys) < 8:
                break
            node = child
        dropped = index.take_dropped()
        store.drop(dropped)
        for save in saves:
            _save(store, *save)
            assert store.num_bytes <= budget
        assert store.num_bytes == index.num_bytes
        num_evicted += len(dropped)
    assert num_evicted > 100
    index.clear()
    store.drop(index.take_dropped())
    assert store.num_bytes == 0


# -- rows that keep their cells by blocks --------------------------------------------------------------------

SIZE = 8  # cells of a block


def _in_blocks(num_blocks: int = 12) -> list[RaggedKV]:
    buffers = []
    for i, spec in enumerate(SPECS):
        kv = RaggedKV(spec)
        kv.resize_blocks(num_blocks, SIZE)
        kv.keys = mx.random.normal(kv.keys.shape, key=mx.random.key(2 * i)).astype(spec.dtype)
        kv.values = mx.random.normal(kv.values.shape, key=mx.random.key(2 * i + 1)).astype(spec.dtype)
        mx.eval(kv.keys, kv.values)
        buffers.append(kv)
    return buffers


@pytest.mark.parametrize("most_at_once", [1, 2, 32])
def test_blocks_of_rows_are_saved_and_loaded(most_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_store, "MAX_GATHERED_BLOCKS", most_at_once)
    buffers = _in_blocks()
    store = PrefixStore(buffers, SIZE)
    saves = [
        SaveCells(1, 0, 0, SIZE, row_block=7),
        SaveCells(2, 0, SIZE, 2 * SIZE, row_block=3),
        SaveCells(3, 0, 2 * SIZE, 2 * SIZE + 5, row_block=4),  # a tail
        SaveCells(4, 1, SIZE, 2 * SIZE, row_block=9),  # another row
    ]
    wanted = {save.block_id: _cells(buffers, save.row_block or 0, 0, SIZE) for save in saves}
    others = [_cells(buffers, block, 0, SIZE) for block in (2, 11)]
    store.save_row_blocks(saves)
    store.settle(save.block_id for save in saves)
    held = sum(kv.spec.bytes_per_cell for kv in buffers) * (3 * SIZE + 5)
    assert store.num_bytes == held
    for kv in buffers:
        kv.keys, kv.values = mx.zeros_like(kv.keys), mx.zeros_like(kv.values)
    pieces = [BlockPiece(1, 0, SIZE), BlockPiece(4, 0, SIZE), BlockPiece(2, 2, SIZE), BlockPiece(3, 0, 5)]
    store.load_into_blocks([5, 6, 8, 10], pieces)
    for block, piece in zip((5, 6, 8, 10), pieces, strict=True):
        found = _cells(buffers, block, piece.first, piece.last)
        assert _same(found, [part[:, piece.first : piece.last] for part in wanted[piece.block_id]])
    assert not any(part.any() for part in _cells(buffers, 8, 0, 2)), "cells before the piece"
    assert not any(part.any() for block in (2, 3, 4, 7, 9, 11) for part in _cells(buffers, block, 0, SIZE))
    assert all(part.any() for other in others for part in other)


def test_rows_with_slots_and_rows_with_blocks_have_the_same_cached_blocks() -> None:
    """Files on disk serve both."""
    slots, blocks = _buffers(num_slots=1, capacity=SIZE), _in_blocks(3)
    for kv, other in zip(slots, blocks, strict=True):
        other.keys[2], other.values[2] = kv.keys[0, :, :SIZE], kv.values[0, :, :SIZE]
    one, two = PrefixStore(slots), PrefixStore(blocks, SIZE)
    _save(one, 1, slot=0, start=0, end=SIZE)
    two.save_row_blocks([SaveCells(1, 0, 0, SIZE, row_block=2)])
    found, expected = two.to_host(1), one.to_host(1)
    assert found.keys() == expected.keys()
    for name, part in expected.items():
        assert part.dtype == found[name].dtype
        assert np.array_equal(part.data, found[name].data)
