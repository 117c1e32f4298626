"""Finds where a lazy grammar starts: markers in the text of a row's tokens, which may be cut anywhere.

    text    … I look. <tool_c | all>\n      a token may end in a marker, or go on after it:
    state             "<tool_c"  remainder: "\n"         the grammar then starts with marker and remainder

A token that goes on after the marker must be one that the grammar allows. So there is a mask for each place
inside a marker at which such tokens exist; everywhere else all tokens are allowed, and nothing is computed.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from outrider.answer_form import Marker, Triggers
from outrider.grammar.matcher import ids_of_model

BLANK = b" \t\r\n"
OTHER = b"\xff"  # an added token that is in no marker: a byte that no text has
MAX_BLANKS = 64  # at the start of an answer, after which it is text; chosen by hand


class TokenTexts:
    """The bytes of each token of a tokenizer."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        num_ids = min(vocab_size, tokenizer.vocab_size)
        self.texts: list[bytes] = [tokenizer.decode_bytes([i]) for i in range(num_ids)]
        self.texts += [b""] * (vocab_size - num_ids)
        self.vocab_size = vocab_size
        self.added = frozenset(i for i in range(num_ids) if tokenizer.is_special_token(i))
        plain = [(text, i) for i, text in enumerate(self.texts) if text and i not in self.added]
        self._plain = dict(plain)
        self._longest = max(map(len, self._plain), default=0)
        self._sorted = sorted(plain)
        self._by_length = sorted((len(text), i) for text, i in plain)

    def encode(self, text: bytes) -> list[int]:
        """Some tokens of this text, the longest first: to a grammar all ways to cut a text are alike."""
        found, at = [], 0
        while at < len(text):
            ends = range(min(len(text), at + self._longest), at, -1)
            end = next((end for end in ends if text[at:end] in self._plain), None)
            if end is None:
                raise ValueError(f"the tokenizer has no token for {text[at:]!r}")
            found.append(self._plain[text[at:end]])
            at = end
        return found

    def starting_with(self, prefix: bytes) -> Iterator[tuple[int, bytes]]:
        """The plain tokens that are longer than this text and start with it, with the rest of each."""
        for at in range(bisect.bisect_left(self._sorted, (prefix, -1)), len(self._sorted)):
            text, token_id = self._sorted[at]
            if not text.startswith(prefix):
                return
            if len(text) > len(prefix):
                yield token_id, text[len(prefix) :]

    def containing(self, inner: bytes) -> Iterator[tuple[int, bytes]]:
        """The plain tokens that go on after this text, with the rest of each."""
        for at in range(bisect.bisect_left(self._by_length, (len(inner) + 1, -1)), len(self._by_length)):
            token_id = self._by_length[at][1]
            _, found, rest = self.texts[token_id].partition(inner)
            if found and rest:
                yield token_id, rest


class Phase(Enum):
    MAY_THINK = "the answer may start with reasoning"
    THINKING = "inside reasoning"
    START = "only blanks since the start of the answer, or since a call"
    TEXT = "inside the answer"


class State(NamedTuple):
    phase: Phase
    tail: bytes  # the last text, as much as can be the start of a marker


class Started(NamedTuple):
    """The grammar starts after these tokens: the marker, and what the last token has after the marker."""

    token_ids: list[int]


class CompiledTriggers:
    """The triggers of one grammar for one tokenizer. Immutable: any number of rows share it."""

    def __init__(
        self, triggers: Triggers, texts: TokenTexts, new_matcher: Callable[[Sequence[int]], Any]
    ) -> None:
        """`new_matcher`: the grammar after some tokens."""
        self._texts = texts
        markers = (*triggers.markers, *(triggers.reasoning or ()))
        self._atoms = texts.added - {part for marker in markers for part in marker if isinstance(part, int)}
        self._at_start = triggers.at_start
        self._in_reasoning = triggers.in_reasoning
        self._opening, self._closing = b"", b""
        if triggers.reasoning is not None:
            self._opening, self._closing = map(self._text, triggers.reasoning)
        self._markers: dict[bytes, list[int]] = {}
        self._masks: dict[bytes, np.ndarray] = {}  # by the start of a marker that the text ends with
        self._allow_all: np.ndarray | None = None
        for marker in triggers.markers:
            self._add(marker, new_matcher)
        self._num_kept = max((len(text) for text in (*self._markers, self._closing)), default=1) - 1
        phase = Phase.START if triggers.reasoning is None else Phase.MAY_THINK
        self.first = State(Phase.THINKING if triggers.starts_inside else phase, b"")

    def next_state(self, state: State, token_id: int) -> State | Started:
        """The state after one more token."""
        token = OTHER if token_id in self._atoms else self._texts.texts[token_id]
        phase, text = state.phase, state.tail + token
        if phase is Phase.MAY_THINK:
            start = text.lstrip(BLANK)
            if start.startswith(self._opening):
                phase, text = Phase.THINKING, start[len(self._opening) :]
            elif self._opening.startswith(start) and len(text) < MAX_BLANKS:
                return State(phase, text)
            else:
                phase = Phase.START
        if phase is Phase.THINKING:
            before, found, after = text.partition(self._closing)
            if self._in_reasoning and (started := self._find(before)):
                return started
            if not found:
                return State(phase, self._kept(text))
            phase, text = Phase.START, after
        return self._in_answer(phase, text)

    def mask(self, state: State) -> np.ndarray | None:
        """The tokens that may come next; None: all of them."""
        if not self._masks or (state.phase is Phase.THINKING and not self._in_reasoning):
            return None
        if self._at_start:
            return self._masks.get(state.tail.lstrip(BLANK)) if state.phase is not Phase.TEXT else None
        found = [mask for start, mask in self._masks.items() if state.tail.endswith(start)]
        return np.bitwise_and.reduce(found) if found else None

    @property
    def allow_all(self) -> np.ndarray:
        assert self._allow_all is not None, "there are no markers"
        return self._allow_all

    @property
    def mask_after_call(self) -> np.ndarray | None:
        """The tokens that may follow a call; None if there are no markers."""
        mask = self.mask(self.after_call)
        return self._allow_all if mask is None else mask

    @property
    def after_call(self) -> State:
        return State(Phase.START, b"")

    def _in_answer(self, phase: Phase, text: bytes) -> State | Started:
        if not self._at_start:
            return self._find(text) or State(Phase.TEXT, self._kept(text))
        start = text.lstrip(BLANK)
        if phase is Phase.START and len(text) - len(start) < MAX_BLANKS:
            for marker, ids in self._markers.items():
                if start.startswith(marker):
                    return Started([*ids, *self._texts.encode(start[len(marker) :])])
            if any(marker.startswith(start) for marker in self._markers):
                return State(phase, text)
        return State(Phase.TEXT, b"")

    def _find(self, text: bytes) -> Started | None:
        """The marker that ends first; of two that end together, the longer one."""
        found = [(at + len(marker), marker) for marker in self._markers if (at := text.find(marker)) >= 0]
        if not found:
            return None
        end, marker = min(found, key=lambda each: (each[0], -len(each[1])))
        return Started([*self._markers[marker], *self._texts.encode(text[end:])])

    def _kept(self, text: bytes) -> bytes:
        return text[len(text) - min(len(text), self._num_kept) :]

    def _text(self, marker: Marker) -> bytes:
        return b"".join(
            part.encode() if isinstance(part, str) else self._texts.texts[part] for part in marker
        )

    def _add(self, marker: Marker, new_matcher: Callable[[Sequence[int]], Any]) -> None:
        """Markers that the grammar does not begin with are left out."""
        text = self._text(marker)
        ids = [
            token_id
            for part in marker
            for token_id in ([part] if isinstance(part, int) else self._texts.encode(part.encode()))
        ]
        matcher = new_matcher(ids)
        if not text or matcher.is_error():
            return
        self._markers[text] = ids
        num_words = len(matcher.compute_bitmask()) // 4
        self._allow_all = ids_of_model(num_words, self._texts.vocab_size)
        is_allowed = functools.cache(functools.partial(self._is_allowed, matcher))
        for num_done in range(len(text)):
            tokens = self._texts.starting_with(text[num_done:]) if num_done else self._texts.containing(text)
            # Most are forbidden by their first byte: the others are looked at one by one.
            banned = [i for i, rest in tokens if not (is_allowed(rest[:1]) and is_allowed(rest))]
            if banned:
                self._ban(text[:num_done], banned)

    def _is_allowed(self, matcher: Any, rest: bytes) -> bool:
        try:
            ids = self._texts.encode(rest)
        except ValueError:  # a part of a character, in a tokenizer without tokens for single bytes
            return len(rest) == 1
        return bool(matcher.validate_tokens(ids) == len(ids))

    def _ban(self, start: bytes, token_ids: Sequence[int]) -> None:
        bits = np.ones(len(self.allow_all) * 32, bool)
        bits[list(token_ids)] = False
        banned = np.packbits(bits, bitorder="little").view(np.uint32)
        self._masks[start] = self._masks.get(start, self.allow_all) & banned
