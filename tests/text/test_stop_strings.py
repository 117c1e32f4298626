import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.text.stop_strings import StopResult, StopStrings


def plain_search(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition: the first end at which any stop string is complete, and there the longest."""
    for end in range(len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            longest = max(matches, key=len)
            return text[: end - len(longest)], longest
    return text, None


def run(chunks: list[str], stops: list[str]) -> tuple[str, str | None]:
    search = StopStrings(stops)
    results = [search.push(chunk) for chunk in chunks]
    matched = results[-1].matched if results else None
    return "".join(result.text for result in results) + search.flush(), matched


def chunkings(alphabet: str) -> st.SearchStrategy[list[str]]:
    return st.lists(st.text(alphabet=alphabet, max_size=6), max_size=12)


def stop_lists(alphabet: str) -> st.SearchStrategy[list[str]]:
    return st.lists(st.text(alphabet=alphabet, min_size=1, max_size=5), max_size=5)


# --- chunking does not matter ---


@given(chunks=chunkings("ab"), stops=stop_lists("ab"))
def test_any_chunking_is_like_a_plain_search(chunks: list[str], stops: list[str]) -> None:
    assert run(chunks, stops) == plain_search("".join(chunks), stops)


@given(chunks=chunkings("abc"), stops=stop_lists("abc"))
def test_single_characters_give_the_same_as_any_chunks(chunks: list[str], stops: list[str]) -> None:
    assert run(chunks, stops) == run(list("".join(chunks)), stops)


@given(chunks=chunkings("é好😀\u0301\n"), stops=stop_lists("é好😀\u0301\n"))
def test_any_chunking_of_unicode_is_like_a_plain_search(chunks: list[str], stops: list[str]) -> None:
    assert run(chunks, stops) == plain_search("".join(chunks), stops)


# --- what is shown, and when ---


@given(chunks=chunkings("ab"), stops=stop_lists("ab").filter(bool))
def test_holds_exactly_what_may_still_become_a_stop_string(chunks: list[str], stops: list[str]) -> None:
    search = StopStrings(stops)
    seen = shown = ""
    for chunk in chunks:
        result = search.push(chunk)
        seen, shown = seen + chunk, shown + result.text
        if result.matched:
            return
        starts = {stop[:size] for stop in stops for size in range(len(stop))}
        longest = max((start for start in starts if seen.endswith(start)), key=len)
        assert seen == shown + longest


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("xaab", ["b", "ab", "aab"], StopResult("x", "aab")),  # on the same character the leftmost start
        ("xabcd", ["abcd", "bc"], StopResult("xa", "bc")),  # what completes first, not what starts first
        ("aaab", ["aab"], StopResult("a", "aab")),
        ("abab", ["abab", "ab"], StopResult("", "ab")),
        ("one\n\ntwo\n\n", ["\n\n"], StopResult("one", "\n\n")),
        ("ab", ["ab", "ab"], StopResult("", "ab")),
        ("nothing", ["xyz"], StopResult("nothing")),
        ("", ["a"], StopResult("")),
    ],
)
def test_match_in_one_piece(text: str, stops: list[str], expected: StopResult) -> None:
    assert StopStrings(stops).push(text) == expected


def test_false_start_is_shown_when_it_fails() -> None:
    search = StopStrings(["</end>"])
    assert search.push("ok </en") == StopResult("ok ")
    assert search.push("try> <") == StopResult("</entry> ")
    assert search.flush() == "<"


def test_nothing_is_shown_after_a_match() -> None:
    search = StopStrings(["."])
    assert search.push("one. two") == StopResult("one", ".")
    assert search.push(" three") == StopResult("", ".")
    assert search.flush() == ""


def test_flush_returns_what_is_held_once() -> None:
    search = StopStrings(["stop"])
    assert search.push("a sto") == StopResult("a ")
    assert search.flush() == "sto"
    assert search.flush() == ""
    assert search.push("p") == StopResult("p")


# --- edges ---


def test_without_stop_strings_text_passes_untouched() -> None:
    search = StopStrings([])
    assert search.push("any text") == StopResult("any text")
    assert search.flush() == ""


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])


def test_long_stop_string_that_never_completes_costs_little() -> None:
    search = StopStrings(["a" * 5_000 + "b"])
    started = time.thread_time()
    shown = "".join(search.push("a" * 4).text for _ in range(5_000))
    assert shown + search.flush() == "a" * 20_000
    assert time.thread_time() - started < 5
