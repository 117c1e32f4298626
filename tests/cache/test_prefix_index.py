"""The prefix index against a plain model of it: a list of texts, compared key by key."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.cache.prefix_index import Node, PrefixIndex, PrefixMatch, pair_key, path_up
from outrider.plan import BlockPiece

BLOCK = 4


def _index(budget: int = 10_000, per_state: int = 0) -> PrefixIndex:
    return PrefixIndex(budget, bytes_per_cell=1, bytes_per_state=per_state, block_size=BLOCK)


def _insert_all(index: PrefixIndex, text: list[int], name: str = "") -> Node:
    """The whole text, block by block, as far as there is room."""
    node = index.root(name)
    for start in range(0, len(text), BLOCK):
        keys = tuple(text[start : start + BLOCK])
        child = index.child(node, keys) or index.insert(node, keys)
        if child is None:
            break
        node = child
    return node


def test_the_longest_prefix_is_found_to_the_cell() -> None:
    index = _index()
    _insert_all(index, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert index.match("", [1, 2, 3, 4, 5, 6, 0, 0]).num_keys == 6
    assert index.match("", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]).num_keys == 9
    assert index.match("", [1, 2]).num_keys == 2
    assert index.match("", [2, 1]).num_keys == 0


def test_a_match_names_the_blocks_in_order() -> None:
    index = _index()
    leaf = _insert_all(index, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    nodes = index.match("", [1, 2, 3, 4, 5, 6, 7, 8, 9]).nodes
    assert list(reversed(nodes)) == list(path_up(leaf))
    assert [len(node.keys) for node in nodes] == [4, 4, 1]


def test_trees_of_other_names_share_nothing() -> None:
    index = _index()
    one = _insert_all(index, [1, 2, 3, 4], "one tenant")
    assert index.match("another", [1, 2, 3, 4]).num_keys == 0
    other = _insert_all(index, [1, 2, 3, 4], "another")
    assert one.block_id != other.block_id
    assert one.digest != other.digest


def test_a_longer_block_replaces_the_tail_it_begins_with() -> None:
    index = _index()
    _insert_all(index, [1, 2, 3, 4, 5, 6])
    _insert_all(index, [1, 2, 3, 4, 5, 6, 7, 8])
    assert index.num_bytes == 8
    assert len(index.take_dropped()) == 1
    assert index.match("", [1, 2, 3, 4, 5, 6, 7]).num_keys == 7


def test_a_tail_that_is_held_stays() -> None:
    index = _index()
    tail = _insert_all(index, [1, 2])
    index.hold(tail)
    _insert_all(index, [1, 2, 3, 4])
    assert tail.is_alive
    assert index.take_dropped() == []


def test_the_least_recently_used_text_goes_first_from_its_end() -> None:
    index = _index(budget=16)
    old = _insert_all(index, [1] * 8)
    _insert_all(index, [2] * 8)
    index.match("", [1] * 8)
    _insert_all(index, [3] * 4)
    assert old.is_alive
    assert index.match("", [2] * 8).num_keys == 4
    assert index.num_bytes == 16


def test_what_is_held_is_never_evicted_nor_are_its_parents() -> None:
    index = _index(budget=8)
    held = _insert_all(index, [1] * 8)
    index.hold(held)
    assert index.insert(index.root(""), (2,)) is None
    index.release(held)
    assert index.insert(index.root(""), (2,)) is not None
    assert not held.is_alive


def test_a_text_longer_than_the_budget_keeps_its_beginning() -> None:
    index = _index(budget=10)
    _insert_all(index, list(range(40)))
    assert index.match("", list(range(40))).num_keys == 8
    index.check_integrity()


def test_states_count_and_go_with_their_block() -> None:
    index = _index(budget=30, per_state=10)
    node = _insert_all(index, [1] * 4)
    state_id = index.add_state(node)
    assert index.num_bytes == 14
    assert index.add_state(node) is None, "one state a block"
    _insert_all(index, [2] * 20)
    assert not node.is_alive
    assert set(index.take_dropped()) == {node.block_id, state_id}
    index.check_integrity()


def test_a_state_without_room_is_refused() -> None:
    index = _index(budget=8, per_state=10)
    assert index.add_state(_insert_all(index, [1] * 4)) is None
    assert index.num_bytes == 4


def test_clear_forgets_all_and_names_what_was_dropped() -> None:
    index = _index()
    index.hold(_insert_all(index, [1] * 9))
    _insert_all(index, [2] * 9, "other")
    index.clear()
    assert index.num_bytes == index.num_blocks == 0
    assert len(index.take_dropped()) == 6
    assert index.match("", [1] * 9).num_keys == 0
    index.check_integrity()


def test_an_empty_tree_takes_no_room() -> None:
    index = _index(budget=4)
    for tenant in range(100):
        _insert_all(index, [1] * 4, f"tenant {tenant}")
    assert len(index._roots) == 1


def test_keys_of_pairs_differ_from_each_other_and_from_token_ids() -> None:
    keys = [pair_key(one, other) for one in (-5, -1, 1, 2) for other in (-5, -1, 0, 7)]
    assert len(set(keys)) == 16
    assert all(key < 0 or key >= 1 << 32 for key in keys)


def test_a_match_ends_where_a_paused_head_could_not_catch_up() -> None:
    """The head was fed two blocks, a part of the third, nothing of the fourth, and the fifth."""
    root = Node(None, (), b"", 0)
    num_fed = (BLOCK, BLOCK, 1, 0, BLOCK)
    nodes = tuple(Node(root, (0,) * BLOCK, b"", 10 + i, num) for i, num in enumerate(num_fed))
    nodes[0].state_id = nodes[3].state_id = 99
    match = PrefixMatch(nodes, 5 * BLOCK, BLOCK)
    assert match.num_loadable == 4 * BLOCK
    assert match.first_deferred == 2
    assert match.num_head_cached(4 * BLOCK) == 2 * BLOCK + 1
    assert match.num_head_cached(BLOCK + 1) == BLOCK + 1
    assert [match.last_state(num) for num in (BLOCK - 1, 4 * BLOCK - 1, 4 * BLOCK)] == [0, BLOCK, 4 * BLOCK]
    assert match.pieces(BLOCK - 1, 2 * BLOCK + 1) == (
        BlockPiece(10, BLOCK - 1, BLOCK), BlockPiece(11, 0, BLOCK), BlockPiece(12, 0, 1),
    )  # fmt: skip
    assert PrefixMatch(nodes[:2], 2 * BLOCK - 1, BLOCK).num_loadable == 2 * BLOCK - 1


def test_many_siblings_are_searched_by_their_order() -> None:
    index = _index()
    rng = random.Random(0)
    texts = [[rng.randrange(3) for _ in range(BLOCK)] for _ in range(60)]
    for text in texts:
        _insert_all(index, text)
    for _ in range(300):
        query = [rng.randrange(4) for _ in range(rng.randint(1, BLOCK))]
        assert index.match("", query).num_keys == max(_num_common(text, query) for text in texts)


def _num_common(one: list[int], other: list[int]) -> int:
    num = 0
    while num < min(len(one), len(other)) and one[num] == other[num]:
        num += 1
    return num


@given(seed=st.integers(0, 2**32), budget=st.integers(0, 60), per_state=st.sampled_from([0, 3, 11]))
@settings(max_examples=200, deadline=None)
def test_any_history_keeps_the_books_and_finds_only_what_was_put_in(
    seed: int, budget: int, per_state: int
) -> None:
    """A fake store follows the index: what it holds is what is accounted, and never more than the budget."""
    rng = random.Random(seed)
    index = _index(budget, per_state)
    store: dict[int, tuple[str, tuple[int, ...]]] = {}  # id -> what the block holds, from the root on
    held: list[Node] = []
    for _ in range(rng.randint(1, 60)):
        name = rng.choice("ab")
        text = [rng.randrange(2) for _ in range(rng.randint(1, 14))]
        action = rng.random()
        if action < 0.5:
            _save(index, store, name, text, rng)
        elif action < 0.8:
            match = index.match(name, text)
            assert sum(len(node.keys) for node in match.nodes[:-1]) <= match.num_keys <= len(text)
            if match.nodes:
                assert store[match.nodes[-1].block_id][0] == name
                held_text = store[match.nodes[-1].block_id][1]
                assert held_text[: match.num_keys] == tuple(text[: match.num_keys])
                if rng.random() < 0.3:
                    index.hold(match.nodes[-1])
                    held.append(match.nodes[-1])
        elif action < 0.9 and held:
            index.release(held.pop(rng.randrange(len(held))))
        elif action < 0.93:
            index.clear()
            held.clear()
        for block_id in index.take_dropped():
            del store[block_id]
        assert all(node.is_alive for node in held)
        index.check_integrity()
        sizes = [per_state if not text else (len(text) - 1) % BLOCK + 1 for _, text in store.values()]
        assert sum(sizes) == index.num_bytes <= budget


def _save(index: PrefixIndex, store: dict, name: str, text: list[int], rng: random.Random) -> None:
    node = index.root(name)
    for start in range(0, len(text), BLOCK):
        keys = tuple(text[start : start + BLOCK])
        child = index.child(node, keys)
        if child is None:
            child = index.insert(node, keys)
            if child is None:
                return
            store[child.block_id] = (name, tuple(text[: start + len(keys)]))
        if len(child.keys) < BLOCK:
            return
        node = child
        if rng.random() < 0.3 and (state_id := index.add_state(node)) is not None:
            store[state_id] = (name, ())


def test_nothing_is_inserted_behind_a_tail() -> None:
    index = _index()
    tail = _insert_all(index, [1, 2])
    with pytest.raises(AssertionError, match="a tail has no children"):
        index.insert(tail, (3,))
