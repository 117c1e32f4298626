import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.cache.embedding_cache import EmbeddingCache, Seen


def rows(count: int, value: float = 1.0) -> mx.array:
    return mx.full((count, 4), value, mx.float32)  # 16 bytes each


def test_what_was_used_longest_ago_goes_first():
    shelf = EmbeddingCache(3 * 16)
    for key in "abc":
        shelf.put(key, rows(1))
    shelf.get("a")
    shelf.put("d", rows(1))
    assert [key in shelf for key in "abcd"] == [True, False, True, True]
    assert shelf.num_bytes == 48


def test_what_is_held_stays_over_the_bound_and_goes_when_released():
    shelf = EmbeddingCache(16)
    shelf.hold(["a", "b"])
    shelf.hold(["a"])
    assert shelf.num_hits == 0  # nothing is there yet
    for key in "ab":
        shelf.put(key, rows(2))
    assert "a" in shelf
    assert "b" in shelf
    shelf.hold(key for key in ("a", "c"))
    assert shelf.num_hits == 1
    shelf.release(["a", "c"])
    shelf.release(["a", "b"])
    assert [key in shelf for key in "ab"] == [True, False]  # the other row still holds it
    shelf.release(["a"])
    assert len(shelf) == shelf.num_bytes == shelf.num_held == 0
    with pytest.raises(AssertionError):
        shelf.release(["a"])


def test_forgotten_holds_free_what_they_held():
    shelf = EmbeddingCache(16)
    shelf.hold(["a"])
    shelf.put("a", rows(5))
    shelf.forget_holds()
    assert len(shelf) == 0


@given(
    st.lists(st.tuples(st.sampled_from(["put", "get", "hold", "release"]), st.integers(0, 5)), max_size=60)
)
def test_the_books_balance_after_any_history(history):
    shelf = EmbeddingCache(5 * 16)
    held: list[str] = []
    for action, number in history:
        key = str(number)
        if action == "put":
            shelf.put(key, rows(number + 1))
        elif action == "get" and key in shelf:
            assert shelf.get(key).shape[0] == number + 1
        elif action == "hold":
            shelf.hold([key])
            held.append(key)
        elif action == "release" and key in held:
            held.remove(key)
            shelf.release([key])
        here = [k for k in map(str, range(6)) if k in shelf]
        assert shelf.num_bytes == sum(16 * (int(k) + 1) for k in here)
        assert shelf.num_bytes <= 5 * 16 or all(k in held for k in here)


def test_seen_pieces_are_put_where_they_stand_and_their_levels_beside():
    wide = mx.concatenate([rows(2, 5.0), rows(2, 6.0), rows(2, 7.0)], axis=1)
    seen = Seen(mx.array([0, 1]), mx.array([2, 0]), wide)
    found = seen.put_into(mx.zeros((2, 3, 4)))
    assert found[..., 0].tolist() == [[0, 0, 5], [5, 0, 0]]
    levels = seen.levels(found)
    assert [level[..., 3].tolist() for level in levels] == [[[0, 0, 6], [6, 0, 0]], [[0, 0, 7], [7, 0, 0]]]
