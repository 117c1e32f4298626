"""The function that turns ids into text: the shortest way there, unless it leads elsewhere."""

from __future__ import annotations

import pytest

from outrider.text.detokenizer import decode_function


class Backend:
    def __init__(self, fails: bool = False) -> None:
        self.fails = fails

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        if self.fails:
            raise TypeError("not like this")
        return "".join(chr(97 + i % 26) for i in token_ids if i or not skip_special_tokens)


class Tokenizer:
    """Counts how often the long way is taken, and may add something on it."""

    def __init__(self, backend: Backend | None, adds: str = "") -> None:
        if backend is not None:
            self.backend_tokenizer = backend
        self._adds = adds
        self.all_special_ids = [0]
        self.num_calls = 0

    def decode(
        self, token_ids: list[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str:
        assert not clean_up_tokenization_spaces
        self.num_calls += 1
        return Backend().decode(token_ids, skip_special_tokens) + (self._adds if 0 in token_ids else "")


def test_the_backend_is_asked_where_it_says_the_same() -> None:
    tokenizer = Tokenizer(Backend())
    decode = decode_function(tokenizer, 50)
    tokenizer.num_calls = 0
    assert decode([0, 1, 2], skips_special=True) == "bc"
    assert decode([0, 1, 2], skips_special=False) == "abc"
    assert tokenizer.num_calls == 0


@pytest.mark.parametrize(
    "tokenizer", [Tokenizer(None), Tokenizer(Backend(), adds="!"), Tokenizer(Backend(fails=True))]
)
def test_else_the_tokenizer_itself_is(tokenizer: Tokenizer) -> None:
    decode = decode_function(tokenizer, 50_000)  # what is special is among many
    tokenizer.num_calls = 0
    assert decode([1, 2], skips_special=True) == "bc"
    assert tokenizer.num_calls == 1
