"""Owns detokenization: a tokenizer's decode function, and the text of one growing answer for the client.

The Detokenizer must not know tokenizers: it calls a decode function and looks at the text that comes back.

    ids pushed so far    . . . . . . . . [ settled ids | unsettled ids ]    the window: only it is decoded
    text of the window                   [ shown             |  held   ]    held: U+FFFD, a few tokens long

The shown part is context. Some decoders treat the first token differently (SentencePiece drops a leading
space, WordPiece writes none): with the context, the next token is not the first.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, Protocol

from outrider.request import Request
from outrider.text.stop_strings import StopStrings

Decode = Callable[[list[int]], str]

INCOMPLETE = "\ufffd"  # decoders write this for bytes that are not, or not yet, a character

MAX_CHARACTER_BYTES = 4

# An incomplete character lacks at least one byte: it began in the last 3 tokens and is at most 3 U+FFFD.
MAX_HELD = MAX_CHARACTER_BYTES - 1

# Tokens left in a trimmed window: each held U+FFFD is at most MAX_HELD tokens; one more token is context.
NUM_AFTER_TRIM = MAX_HELD * MAX_HELD + 1

TRIM_AT = 24  # tokens in the window; chosen by hand
FORCE_TRIM_AT = 2 * TRIM_AT  # tokens in the window: it is trimmed even inside a character

# Random token lists, and the most tokens in each, that compare two decode functions. Chosen by hand.
NUM_COMPARISONS, MAX_COMPARED_TOKENS = 64, 12

MAX_CACHED_TEXTS = 1 << 16  # texts of single tokens; chosen by hand: a few megabytes


class Detokenizer:
    """Turns token ids into text, one at a time. Each character is returned once, when it is final.

    The returned texts join up to `decode(all ids)` if more tokens only extend decode's text, except for
    U+FFFD at its end. If decode changes text that was already returned (space clean-up; a byte-fallback run
    with an invalid byte), the returned text stays, and the later tokens are decoded without it. Pass a decode
    function without space clean-up.

    With `prompt_ids` the text continues the prompt, with its leading space. Without them the text starts
    on its own. A character that is split between prompt and answer stays incomplete.
    """

    def __init__(self, decode: Decode, prompt_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        self._is_empty: dict[int, bool] = {}
        self._window = self._context(prompt_ids)
        self._text = decode(self._window) if self._window else ""  # of the window
        self._shown = self._text  # a prefix of the text, unless decode has changed it
        self._num_settled = len(self._window)  # tokens in the window when nothing was held last

    def push(self, token_id: int) -> str:
        """Take the next token and return the text that is final now: often one word, sometimes none."""
        text = self._decode([*self._window, token_id])
        if text == self._text and self._decodes_to_nothing(token_id):
            return ""
        # Byte fallback writes one U+FFFD per byte of an incomplete character: a shorter text completes it.
        is_whole = len(text) < len(self._text)
        self._window.append(token_id)
        self._text = text
        if self._is_rewritten():
            if self._may_recover():
                return ""
            self._drop_context()
        new_text = self._show(num_held=0 if is_whole else self._num_incomplete())
        if len(self._window) >= TRIM_AT:
            new_text += self._trim()
        return new_text

    def flush(self) -> str:
        """Return the held text, even if it is incomplete: the answer is over."""
        if self._is_rewritten():
            self._drop_context()
        return self._show(num_held=0)

    def _show(self, num_held: int) -> str:
        new_text = self._text[len(self._shown) : len(self._text) - num_held]
        self._shown += new_text
        if num_held == 0:
            self._num_settled = len(self._window)
        return new_text

    def _is_rewritten(self) -> bool:
        return not self._text.startswith(self._shown)

    def _may_recover(self) -> bool:
        """Byte fallback writes a whole run of bytes as U+FFFD while the last character is incomplete."""
        return self._text.endswith(INCOMPLETE) and self._is_fresh()

    def _num_incomplete(self) -> int:
        """The number of U+FFFD at the end that later tokens may still change."""
        num_trailing = len(self._text) - len(self._text.rstrip(INCOMPLETE))
        return num_trailing if self._is_fresh() else min(num_trailing, MAX_HELD)

    def _is_fresh(self) -> bool:
        """True if all unsettled tokens may belong to one character."""
        return len(self._window) - self._num_settled <= MAX_HELD

    def _drop_context(self) -> None:
        self._window = self._window[self._num_settled :]
        self._text = self._decode(self._window)
        self._shown = ""
        self._num_settled = 0

    def _trim(self) -> str:
        """Shorten the window, if possible at the start of a character. Return text that cannot stay held."""
        held = self._text[len(self._shown) :]
        for num_left in range(NUM_AFTER_TRIM, NUM_AFTER_TRIM + MAX_CHARACTER_BYTES):
            text = self._decode(self._window[-num_left:])
            if text.endswith(held) and _starts_whole(text, num_left):
                self._cut_to(num_left, text, held)
                return ""
        if len(self._window) < FORCE_TRIM_AT:
            return ""
        return self._force_trim(held)

    def _force_trim(self, held: str) -> str:
        """Cut inside a character: no character starts near the cut, or every token ends inside a character.

        UTF-8 synchronises again after the cut, so the end of the text stays the same. Only an invalid
        byte-fallback run may decode differently now; then the held text is final.
        """
        text = self._decode(self._window[-NUM_AFTER_TRIM:])
        if text.endswith(held):
            self._cut_to(NUM_AFTER_TRIM, text, held)
            return ""
        self._cut_to(NUM_AFTER_TRIM, text, held="")
        return held

    def _cut_to(self, num_left: int, text: str, held: str) -> None:
        num_dropped = len(self._window) - num_left
        self._window = self._window[-num_left:]
        self._text = text
        self._shown = text[: len(text) - len(held)]
        self._num_settled = max(0, self._num_settled - num_dropped)

    def _context(self, prompt_ids: Sequence[int]) -> list[int]:
        """The fewest last tokens of the prompt that start with a whole character."""
        context: list[int] = []
        for token_id in reversed(prompt_ids):
            if self._decodes_to_nothing(token_id):
                continue
            context.insert(0, token_id)
            if len(context) == MAX_CHARACTER_BYTES or _starts_whole(self._decode(context), len(context)):
                break
        return context

    def _decodes_to_nothing(self, token_id: int) -> bool:
        """True if decode skips the token, as it skips special tokens.

        The token is decoded twice in a row: some tokens ("▁") are empty only in first position.
        """
        if token_id not in self._is_empty:
            self._is_empty[token_id] = self._decode([token_id, token_id]) == ""
        return self._is_empty[token_id]


def _starts_whole(text: str, num_tokens: int) -> bool:
    """True if the tokens start at a character. Otherwise each token is at least one U+FFFD."""
    return not text.startswith(INCOMPLETE) or len(text) < num_tokens


class AnswerText:
    """Turns committed tokens into text that will not change.

    A stop string that ends within the first `min_tokens` tokens is plain text.
    """

    def __init__(
        self,
        decode: Decode,
        prompt_ids: Sequence[int],
        stops: Sequence[str],
        min_tokens: int = 0,
        includes_stop: bool = False,
    ) -> None:
        """`includes_stop`: the text ends after the stop string, not before it."""
        self._detokenizer = Detokenizer(decode, prompt_ids)
        self._stops = StopStrings(stops, includes_stop) if stops else None
        self._num_protected = min_tokens  # coming tokens whose text cannot end the answer

    def push(self, token_id: int) -> tuple[str, str | None]:
        """The text that is final now, and the stop string that was completed, if one was."""
        text = self._detokenizer.push(token_id)
        if self._stops is None:
            return text, None
        found = self._stops.push(text, may_match=self._num_protected <= 0)
        self._num_protected -= 1
        return found.text, found.matched

    def flush(self) -> str:
        """The text that was held back: the answer is over. A stop string in this text still cuts it."""
        text = self._detokenizer.flush()
        if self._stops is None:
            return text
        found = self._stops.push(text, may_match=self._num_protected < 0)
        return found.text if found.matched is not None else found.text + self._stops.flush()


def answer_texts(tokenizer: Any, vocab_size: int) -> Callable[[Request], AnswerText]:
    """A function that makes the AnswerText of a request."""
    decode = decode_function(tokenizer, vocab_size)

    def new_text(request: Request) -> AnswerText:
        params = request.params
        context = request.prompt_ids if request.continues_prompt else ()
        own = partial(decode, skips_special=params.skip_special_tokens)
        includes_stop = params.include_stop_str_in_output
        return AnswerText(own, context, params.stop_strings, params.min_tokens, includes_stop)

    return new_text


def token_texts(tokenizer: Any, vocab_size: int) -> Callable[[int], str]:
    """A function that gives the text of one token, special tokens included."""
    decode = decode_function(tokenizer, vocab_size)

    @lru_cache(MAX_CACHED_TEXTS)
    def token_text(token_id: int) -> str:
        return decode([token_id], skips_special=False)

    return token_text


class TokenizerDecode(Protocol):
    def __call__(self, token_ids: list[int], skips_special: bool) -> str: ...


def decode_function(tokenizer: Any, vocab_size: int) -> TokenizerDecode:
    """The tokenizer's decode function, called for every token of every answer.

    The backend's own function is faster than the wrapper of `transformers`. It is used if both give the same
    text for random tokens.
    """

    def wrapped(token_ids: list[int], skips_special: bool) -> str:
        text: str = tokenizer.decode(
            token_ids, skip_special_tokens=skips_special, clean_up_tokenization_spaces=False
        )
        return text

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return wrapped

    def bare(token_ids: list[int], skips_special: bool) -> str:
        text: str = backend.decode(token_ids, skip_special_tokens=skips_special)
        return text

    special = list(getattr(tokenizer, "all_special_ids", ()))
    return bare if _are_equal(bare, wrapped, vocab_size, special) else wrapped


def _are_equal(one: TokenizerDecode, other: TokenizerDecode, vocab_size: int, special: list[int]) -> bool:
    numbers = random.Random(0)
    for _ in range(NUM_COMPARISONS):
        ids = [numbers.randrange(vocab_size) for _ in range(numbers.randint(1, MAX_COMPARED_TOKENS))]
        if special:
            ids.insert(numbers.randint(0, len(ids)), numbers.choice(special))
        for skips_special in (True, False):
            expected = other(ids, skips_special)
            try:
                if one(ids, skips_special) != expected:
                    return False
            except TypeError:  # the backend's function takes other arguments
                return False
    return True
