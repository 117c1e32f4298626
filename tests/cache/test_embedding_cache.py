import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.cache.embedding_cache import EmbeddingCache, ImageInputs


def rows(count: int, value: float = 1.0) -> mx.array:
    return mx.full((count, 4), value, mx.float32)  # 16 bytes each


def test_what_was_used_longest_ago_goes_first():
    cache = EmbeddingCache(3 * 16)
    for key in "abc":
        cache.put(key, rows(1))
    cache.get("a")
    cache.put("d", rows(1))
    assert [key in cache for key in "abcd"] == [True, False, True, True]
    assert cache.num_bytes == 48


def test_what_is_held_stays_over_the_bound_and_goes_when_released():
    cache = EmbeddingCache(16)
    cache.hold(["a", "b"])
    cache.hold(["a"])
    assert cache.num_hits == 0  # nothing is there yet
    for key in "ab":
        cache.put(key, rows(2))
    assert "a" in cache
    assert "b" in cache
    cache.hold(key for key in ("a", "c"))
    assert cache.num_hits == 1
    cache.release(["a", "c"])
    cache.release(["a", "b"])
    assert [key in cache for key in "ab"] == [True, False]  # the other row still holds it
    cache.release(["a"])
    assert len(cache) == cache.num_bytes == cache.num_held == 0
    with pytest.raises(AssertionError):
        cache.release(["a"])


def test_forgotten_holds_free_what_they_held():
    cache = EmbeddingCache(16)
    cache.hold(["a"])
    cache.put("a", rows(5))
    cache.forget_holds()
    assert len(cache) == 0


@given(
    st.lists(st.tuples(st.sampled_from(["put", "get", "hold", "release"]), st.integers(0, 5)), max_size=60)
)
def test_the_books_balance_after_any_history(history):
    cache = EmbeddingCache(5 * 16)
    held: list[str] = []
    for action, number in history:
        key = str(number)
        if action == "put":
            cache.put(key, rows(number + 1))
        elif action == "get" and key in cache:
            assert cache.get(key).shape[0] == number + 1
        elif action == "hold":
            cache.hold([key])
            held.append(key)
        elif action == "release" and key in held:
            held.remove(key)
            cache.release([key])
        here = [k for k in map(str, range(6)) if k in cache]
        assert cache.num_bytes == sum(16 * (int(k) + 1) for k in here)
        assert cache.num_bytes <= 5 * 16 or all(k in held for k in here)


def test_seen_pieces_are_put_where_they_stand_and_their_levels_beside():
    wide = mx.concatenate([rows(2, 5.0), rows(2, 6.0), rows(2, 7.0)], axis=1)
    seen = ImageInputs(mx.array([0, 1]), mx.array([2, 0]), wide)
    found = seen.put_into(mx.zeros((2, 3, 4)))
    assert found[..., 0].tolist() == [[0, 0, 5], [5, 0, 0]]
    levels = seen.levels(found)
    assert [level[..., 3].tolist() for level in levels] == [[[0, 0, 6], [6, 0, 0]], [[0, 0, 7], [7, 0, 0]]]
