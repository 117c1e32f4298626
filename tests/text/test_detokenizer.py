from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from outrider.text.detokenizer import INCOMPLETE, MAX_HELD, Detokenizer

SPECIAL = "<|end|>"
CLOSE_CALLS = "你好😀é\ufffd ▁ \n👨‍👩‍👧a."

texts = st.text(max_size=60) | st.text(alphabet=CLOSE_CALLS, max_size=60)
# Taken modulo the vocabulary; the small ones make runs of few distinct tokens likely.
indices = st.lists(st.integers(0, 2**16) | st.integers(0, 8), max_size=120)


def ids_from(tokenizer: Tokenizer, indices: Sequence[int]) -> list[int]:
    return [index % tokenizer.get_vocab_size() for index in indices]


def pieces_of(tokenizer: Tokenizer, ids: Sequence[int], prompt_ids: Sequence[int] = ()) -> list[str]:
    detokenizer = Detokenizer(tokenizer.decode, prompt_ids)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


def ids_of(tokenizer: Tokenizer, tokens: Sequence[str]) -> list[int]:
    vocab = tokenizer.get_vocab()
    return [vocab[token] for token in tokens]


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token a byte, for tokenizers with byte fallback."""
    return ids_of(tokenizer, [f"<0x{byte:02X}>" for byte in data])


def raw_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token a byte, for byte-level tokenizers."""
    by_byte = {}
    for token, token_id in tokenizer.get_vocab().items():
        if len(token) == 1:
            by_byte[_byte_written_as(token)] = token_id
    return [by_byte[byte] for byte in data]


def _byte_written_as(character: str) -> int:
    """GPT-2 writes printable bytes as themselves and the others, in order, from U+0100 on."""
    others = [byte for byte in range(256) if not (33 <= byte < 127 or 161 <= byte < 173 or byte >= 174)]
    return others[ord(character) - 256] if ord(character) >= 256 else ord(character)


# --- the pieces join up to the whole ---


@given(text=texts)
@example(text="\ufffd\u0800")  # bytes that are a genuine U+FFFD, then bytes that are one only until complete
@example(text="\ufffd" * 40 + "é")
def test_pieces_of_any_text_join_to_its_decoding(any_text: Tokenizer, text: str) -> None:
    ids = any_text.encode(text).ids
    assert "".join(pieces_of(any_text, ids)) == any_text.decode(ids)


@given(indices=indices)
def test_pieces_of_any_ids_join_to_their_decoding(prefix_stable: Tokenizer, indices: list[int]) -> None:
    ids = ids_from(prefix_stable, indices)
    assert "".join(pieces_of(prefix_stable, ids)) == prefix_stable.decode(ids)


@given(data=st.lists(st.sampled_from(b"\xf0\x9f\x98\x80\xe4\xbd\xa0\xc3\xa9a\xff"), max_size=150).map(bytes))
@example(data=b"\xf0\x9f\x98" * 40)
@example(data=b"\xf0\x9f\x98" * 40 + b"\x80")
@example(data=b"\x80" * 100 + "你".encode())
def test_pieces_of_broken_bytes_join_to_their_decoding(byte_level: Tokenizer, data: bytes) -> None:
    ids = raw_ids(byte_level, data)
    assert "".join(pieces_of(byte_level, ids)) == data.decode(errors="replace")


@pytest.mark.parametrize("junk", [b"\x80", b"\xff", b"\xe4\xbd", b"\xf0\x9f\x98", b"a\xc3"])
def test_character_after_any_length_of_junk_is_whole(byte_level: Tokenizer, junk: bytes) -> None:
    for num_junk in range(100):
        data = junk * num_junk + b"\x80" + "😀你".encode()
        pieces = pieces_of(byte_level, raw_ids(byte_level, data))
        assert "".join(pieces) == data.decode(errors="replace")


@given(
    runs=st.lists(
        st.tuples(st.text(max_size=8), st.sampled_from(["▁", "▁▁", "▁the", "llo", SPECIAL])), max_size=20
    )
)
def test_pieces_of_byte_fallback_runs_join_to_their_decoding(
    byte_fallback: Tokenizer, runs: list[tuple[str, str]]
) -> None:
    ids: list[int] = []
    for text, token in runs:
        ids += byte_ids(byte_fallback, text.encode()) + ids_of(byte_fallback, [token])
    assert "".join(pieces_of(byte_fallback, ids)) == byte_fallback.decode(ids)


@given(indices=indices)
def test_no_character_of_a_spoilt_byte_fallback_is_lost(byte_fallback: Tokenizer, indices: list[int]) -> None:
    ids = ids_from(byte_fallback, indices)
    ours = iter("".join(pieces_of(byte_fallback, ids)))
    assert all(character in ours for character in byte_fallback.decode(ids).replace(INCOMPLETE, ""))


def test_characters_cut_by_every_token_join_up() -> None:
    text = "你好世界" * 40
    data = text.encode()
    chunks = [data[:1], *(data[start : start + 3] for start in range(1, len(data), 3))]

    def decode(ids: list[int]) -> str:
        return b"".join(chunks[index] for index in ids).decode(errors="replace")

    detokenizer = Detokenizer(decode)
    pieces = [detokenizer.push(index) for index in range(len(chunks))]
    assert pieces[:3] == ["", "你", "好"]
    assert "".join(pieces) == text


# --- nothing torn is shown, and nothing is held for long ---


@given(text=texts.filter(lambda text: INCOMPLETE not in text))
def test_whole_text_never_shows_a_torn_character(any_text: Tokenizer, text: str) -> None:
    assert not any(INCOMPLETE in piece for piece in pieces_of(any_text, any_text.encode(text).ids))


@given(indices=indices)
def test_nothing_is_held_for_more_than_a_few_tokens(prefix_stable: Tokenizer, indices: list[int]) -> None:
    detokenizer = Detokenizer(prefix_stable.decode)
    ids = [index for index in ids_from(prefix_stable, indices) if prefix_stable.decode([index])]
    shown = ""
    for num_ids, token_id in enumerate(ids, start=1):
        shown += detokenizer.push(token_id)
        held = prefix_stable.decode(ids[:num_ids]).removeprefix(shown)
        assert held == INCOMPLETE * len(held)
        num_due = len(prefix_stable.decode(ids[: max(0, num_ids - MAX_HELD)])) - MAX_HELD
        assert len(shown) >= num_due


def test_words_are_shown_with_the_token_that_brings_them(every: Tokenizer) -> None:
    words = [index for index in range(every.get_vocab_size()) if every.decode([index]).isascii()]
    detokenizer = Detokenizer(every.decode)
    shown = ""
    for num_ids, token_id in enumerate(words, start=1):
        shown += detokenizer.push(token_id)
        assert shown == every.decode(words[:num_ids])


def test_emoji_of_four_tokens_comes_with_the_last(byte_level: Tokenizer) -> None:
    assert pieces_of(byte_level, raw_ids(byte_level, "😀".encode())) == ["", "", "", "😀", ""]


def test_byte_fallback_run_shows_each_character_as_it_completes(byte_fallback: Tokenizer) -> None:
    pieces = pieces_of(byte_fallback, byte_ids(byte_fallback, "\n你é😀".encode()))
    assert pieces == ["\n", "", "", "你", "", "é", "", "", "", "😀", ""]


def test_torn_end_comes_with_flush_and_only_once(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level.decode)
    for token_id in raw_ids(byte_level, b"a\xe4\xbd"):
        detokenizer.push(token_id)
    assert detokenizer.flush() == INCOMPLETE
    assert detokenizer.flush() == ""


def test_genuine_replacement_character_waits_for_the_next_token_at_most(any_text: Tokenizer) -> None:
    ids = [*any_text.encode("o\ufffd").ids, any_text.encode("o").ids[-1]]
    *pieces, flushed = pieces_of(any_text, ids)
    assert "".join(pieces) == "o" + INCOMPLETE + "o"
    assert flushed == ""


def test_endless_bad_bytes_are_shown_as_they_come(byte_level: Tokenizer, byte_fallback: Tokenizer) -> None:
    for tokenizer, bad in (
        (byte_level, raw_ids(byte_level, b"\x80")),
        (byte_fallback, byte_ids(byte_fallback, b"\x80")),
    ):
        pieces = pieces_of(tokenizer, bad * 200)
        assert pieces == [*[""] * MAX_HELD, *[INCOMPLETE] * (200 - MAX_HELD), INCOMPLETE * MAX_HELD]


# --- byte-fallback runs spoilt by a bad byte: decode rewrites the whole run, what was shown stands ---


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"\n\xe4", "\n\ufffd"),
        ("你好".encode() + b"\xe4", "你好\ufffd"),
        ("你好".encode() + b"\x80" * 5, "你好" + INCOMPLETE * 5),
    ],
)
def test_bad_byte_does_not_spoil_what_was_shown(byte_fallback: Tokenizer, data: bytes, expected: str) -> None:
    ids = byte_ids(byte_fallback, data)
    assert "".join(pieces_of(byte_fallback, ids)) == expected
    assert "".join(pieces_of(byte_fallback, [*ids, *ids_of(byte_fallback, ["▁the"])])) == expected + " the"


@pytest.mark.parametrize("num_words", range(40))
def test_bad_byte_does_not_spoil_what_was_shown_wherever_it_comes(
    byte_fallback: Tokenizer, num_words: int
) -> None:
    bad = byte_ids(byte_fallback, "你好".encode() + b"\xe4")
    ids = [*ids_of(byte_fallback, ["▁the"] * num_words), *bad, *ids_of(byte_fallback, ["▁the"])]
    expected = " the" * num_words + "你好\ufffd the"
    assert "".join(pieces_of(byte_fallback, ids)) == expected.lstrip()


def test_bad_bytes_after_a_good_run_are_shown_as_they_come(byte_fallback: Tokenizer) -> None:
    pieces = pieces_of(byte_fallback, byte_ids(byte_fallback, "好".encode() + b"\x80" * 50))
    assert pieces[3:] == [*[""] * MAX_HELD, *[INCOMPLETE] * (50 - MAX_HELD), INCOMPLETE * MAX_HELD]


def test_spoilt_run_reads_as_decode_has_it(byte_fallback: Tokenizer) -> None:
    ids = byte_ids(byte_fallback, b"\x80" + b"\n" * 30)
    assert "".join(pieces_of(byte_fallback, ids)) == byte_fallback.decode(ids)


@pytest.mark.parametrize("num_bytes", [30, 60, 100, 200])
def test_every_byte_of_a_long_spoilt_run_is_shown(byte_fallback: Tokenizer, num_bytes: int) -> None:
    text = "".join(pieces_of(byte_fallback, byte_ids(byte_fallback, b"\x80" + b"\n" * num_bytes)))
    assert len(text) == 1 + num_bytes
    assert set(text) <= {INCOMPLETE, "\n"}


@pytest.mark.parametrize("num_bytes", [30, 60, 100, 200])
@pytest.mark.parametrize("data", [b"\n", "好".encode(), b"\n\x80"])
def test_text_comes_right_again_after_a_long_spoilt_run(
    byte_fallback: Tokenizer, data: bytes, num_bytes: int
) -> None:
    ids = byte_ids(byte_fallback, b"\x80" + data * (num_bytes // len(data)))
    text = "".join(pieces_of(byte_fallback, ids + ids_of(byte_fallback, ["▁the", "▁world"])))
    assert text.startswith(INCOMPLETE)
    assert text.endswith(" the world")
    assert text.count("the") == 1


# --- tokens without text ---


@pytest.mark.parametrize("num_special", [1, 200])
def test_special_tokens_do_not_cost_the_space_after_them(byte_fallback: Tokenizer, num_special: int) -> None:
    ids = ids_of(byte_fallback, ["▁the", *[SPECIAL] * num_special, "▁world"])
    assert pieces_of(byte_fallback, ids) == ["the", *[""] * num_special, " world", ""]


def test_special_tokens_first_do_not_bring_a_space(byte_fallback: Tokenizer) -> None:
    ids = ids_of(byte_fallback, [*[SPECIAL] * 60, "▁the"])
    assert "".join(pieces_of(byte_fallback, ids)) == "the"


def test_empty_first_space_token_still_counts_as_first(byte_fallback: Tokenizer) -> None:
    ids = ids_of(byte_fallback, ["▁", SPECIAL, "▁the"])
    assert pieces_of(byte_fallback, ids) == ["", "", " the", ""]


def test_special_tokens_inside_a_character_do_not_tear_it(byte_level: Tokenizer) -> None:
    special = ids_of(byte_level, [SPECIAL])
    first, *rest = raw_ids(byte_level, "你".encode())
    assert "".join(pieces_of(byte_level, [first, *special * 50, *rest])) == "你"


# --- the prompt as context ---


@given(prompt=texts, answer=texts)
def test_text_is_what_follows_the_prompt(any_text: Tokenizer, prompt: str, answer: str) -> None:
    prompt_ids, ids = any_text.encode(prompt).ids, any_text.encode(answer).ids
    whole, before = any_text.decode(prompt_ids + ids), any_text.decode(prompt_ids)
    assert whole.startswith(before)
    assert "".join(pieces_of(any_text, ids, prompt_ids)) == whole[len(before) :]


# Without "▁": the decoder of metaspace_unigram drops one that is written in bytes.
@given(
    prompt=st.text(min_size=1),
    answer=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=20),
)
def test_prompt_may_end_inside_a_byte_fallback_run(
    byte_fallback: Tokenizer, prompt: str, answer: str
) -> None:
    prompt_ids = byte_ids(byte_fallback, prompt.encode())
    ids = byte_ids(byte_fallback, answer.encode())
    assert "".join(pieces_of(byte_fallback, ids, prompt_ids)) == answer


def test_leading_space_depends_on_there_being_a_prompt(byte_fallback: Tokenizer) -> None:
    ids = ids_of(byte_fallback, ["▁world"])
    prompt_ids = ids_of(byte_fallback, ["▁the", *[SPECIAL] * 30])
    assert pieces_of(byte_fallback, ids) == ["world", ""]
    assert pieces_of(byte_fallback, ids, prompt_ids) == [" world", ""]


def test_prompt_of_special_tokens_only_is_no_context(byte_fallback: Tokenizer) -> None:
    ids = ids_of(byte_fallback, ["▁world"])
    assert pieces_of(byte_fallback, ids, ids_of(byte_fallback, [SPECIAL] * 3)) == ["world", ""]


def test_replacement_character_of_the_prompt_is_not_repeated(any_text: Tokenizer) -> None:
    prompt_ids = any_text.encode("o\ufffd").ids
    assert "".join(pieces_of(any_text, any_text.encode("o").ids[-1:], prompt_ids)) == "o"


def test_character_torn_between_prompt_and_answer_stays_torn(byte_level: Tokenizer) -> None:
    first, *rest = raw_ids(byte_level, "你".encode())
    assert "".join(pieces_of(byte_level, rest, [first])) == INCOMPLETE * 2


# --- decoders that rewrite spaces ---


def test_space_clean_up_loses_and_repeats_nothing() -> None:
    tokens = ["do", " n", "'t", " ", ".", " so"]

    def decode(ids: list[int]) -> str:
        return "".join(tokens[index] for index in ids).replace(" n't", "n't").replace(" .", ".")

    detokenizer = Detokenizer(decode)
    pieces = [detokenizer.push(index) for index in range(len(tokens))]
    assert pieces == ["do", " n", "'t", " ", ".", " so"]


# --- cost ---


@given(indices=indices, num_repeats=st.integers(1, 4))
@example(indices=[0] * 100, num_repeats=4)  # the special token or the unknown one
@example(indices=[0x81] * 100, num_repeats=4)  # bad bytes
def test_cost_of_a_token_does_not_grow_with_the_answer(
    every: Tokenizer, indices: list[int], num_repeats: int
) -> None:
    longest = 0

    def decode(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return every.decode(ids)

    detokenizer = Detokenizer(decode)
    for token_id in ids_from(every, indices) * num_repeats:
        detokenizer.push(token_id)
    assert longest <= 64
