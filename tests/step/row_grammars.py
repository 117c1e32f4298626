"""Grammars for the rows of random histories, over a tokenizer in which a text can be cut in several sampling.

What a grammar allows is told by a matcher that is only ever fed: it never looks ahead, never steps back.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from outrider.answer_form import Grammar, Triggers
from outrider.grammar.backend import TokenizerSource, tokenizer_source
from outrider.grammar.compiler import GrammarCompiler
from outrider.grammar.matcher import CompiledGrammar
from outrider.request import SamplingParams
from tiny_models import END_ID, SPECIAL_TOKENS, VOCAB_SIZE

EOS_IDS = frozenset({END_ID})
MERGES = ("ab", "bc", "abc", "ca", "12", "23", "123", "yes", "ye", '{"', '":', "no")
SMALL_OBJECT = {
    "type": "object",
    "properties": {"abc": {"type": "string", "maxLength": 4}, "no": {"type": "integer", "maximum": 123}},
    "required": ["abc", "no"],
    "additionalProperties": False,
}
GRAMMARS = (
    Grammar("regex", "[a-c]{3}-[0-9]{2}"),
    Grammar("regex", "(abc|ab1|bca|123)*"),
    Grammar("regex", "abcabc123[ab]{2,}123123"),  # mostly forced
    Grammar("regex", "[ -~]*"),  # hardly anything is forbidden, and the end may come at any place
    Grammar("regex", "[a-z]{0,9}\\.[a-z]*"),
    Grammar("json_schema", json.dumps(SMALL_OBJECT)),
    Grammar("json_schema", '{"type": "array", "items": {"enum": [1, 12, 123, "abc"]}, "minItems": 2}'),
    Grammar("lark", 'start: ("yes" | "no" | "yesno")+ "."'),
)

# Lazy grammars: their texts begin with their markers. A token such as "abc" goes on after the marker "ab".
LAZY = (
    Grammar("lark", 'start: "ab" /[0-9]{1,3}/ "."', triggers=Triggers((("ab",),))),
    Grammar("lark", 'start: "ab" ("c" | "1") "ca"', triggers=Triggers((("ab",),))),
    Grammar("lark", 'start: ("bc" | "a12") "yes"', triggers=Triggers((("bc",), ("a12",)))),
    Grammar("lark", 'start: "1" "2" /[a-c]*/ "no"', triggers=Triggers((("1",),), at_start=True)),
    Grammar(
        "lark",
        'start: "a" /[0-9]{2}/',
        triggers=Triggers((("a",),), reasoning=(("b",), ("c",))),
    ),
    Grammar(
        "lark",
        'start: "ca" /[0-9]{2}/',
        triggers=Triggers((("ca",),), reasoning=(("b",), ("1",)), starts_inside=True),
    ),
)
VOWELS = Grammar(
    "lark",
    "start: /[aeiouAEIOU0-9]/ /[a-z0-9]{1,3}[.,]/",
    triggers=Triggers(tuple((letter,) for letter in "aeiouAEIOU0123456789")),
)
LIKELY = "abc12"  # the letters of the markers

AllowedNow = Callable[[Sequence[int]], np.ndarray | None]  # of an answer so far; None: everything


def _tables() -> TokenizerSource:
    """ASCII characters and a few longer pieces that are made of them."""
    letters = [symbol for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()) if symbol.isascii()]
    symbols = [*SPECIAL_TOKENS, *letters, "Ġ", "Ċ", "ĉ"]
    merges = []
    for piece in sorted(MERGES, key=len):
        left = max((s for s in symbols if piece.startswith(s) and piece != s), key=len)
        if piece[len(left) :] in symbols and len(symbols) < VOCAB_SIZE:
            symbols.append(piece)
            merges.append((left, piece[len(left) :]))
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(symbols)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL_TOKENS[END_ID])
    return tokenizer_source(fast, VOCAB_SIZE, EOS_IDS)


@functools.cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(_tables)


def with_random_grammar(rng: random.Random, params: SamplingParams, vocab_size: int) -> SamplingParams:
    """The same parameters held to a grammar, perhaps from a marker on that is likely to come."""
    bias = {token_id: max(value, -2.5) for token_id, value in params.logit_bias.items()}
    after_ids: tuple[int, ...] = ()
    if rng.random() < 0.5:
        marker = rng.sample(range(1, vocab_size), 2)
        after_ids = rng.choice(((marker[0],), (marker[0],), (marker[0], marker[0]), (*marker, marker[0])))
        bias.update(dict.fromkeys(after_ids, rng.choice((2.0, 4.0))))
        params = replace(params, max_tokens=rng.randint(10, 40), min_tokens=0, draft_depth=rng.randint(2, 8))
    if rng.random() < 0.3:
        bias[END_ID] = rng.choice((-3.0, 4.0))
    grammar = replace(rng.choice(GRAMMARS), after_ids=after_ids)
    return replace(params, grammar=grammar, min_tokens=0, logit_bias=bias)


def with_lazy_grammar(rng: random.Random, params: SamplingParams) -> SamplingParams:
    """Markers come often, and no token ends the answer."""
    texts = token_texts()
    likely = [i for i, text in enumerate(texts) if text and set(text) <= set(LIKELY.encode())]
    bias = {**dict.fromkeys(likely, rng.choice((3.0, 6.0))), END_ID: -6.0}
    return replace(
        params,
        grammar=rng.choice(LAZY),
        logit_bias=bias if rng.random() < 0.5 else {},
        min_tokens=0,
        draft_depth=rng.choice((0, 1, 3, 8)),
        max_tokens=rng.randint(10, 60),
    )


@functools.cache
def token_texts() -> list[bytes]:
    tokenizer = compiler()._get_tokenizer()
    return [
        b"\xff" if tokenizer.is_special_token(i) else tokenizer.decode_bytes([i]) for i in range(VOCAB_SIZE)
    ]


def _allowed_by_lazy(grammar: Grammar) -> AllowedNow:
    """Read from the first token on each time: slow and plain."""
    compiled = compiler()._compile(Grammar(grammar.kind, grammar.text))

    def allowed(answer: Sequence[int]) -> np.ndarray | None:
        matcher = _Reading(grammar, compiled).read(answer)
        if matcher is not None:
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            return np.unpackbits(bits, bitorder="little")[:VOCAB_SIZE].astype(bool)
        found = np.ones(VOCAB_SIZE, bool)
        for token_id, text in enumerate(token_texts()):
            if len(text) > 1:  # only a token of several characters can go on after a marker
                try:
                    _Reading(grammar, compiled).read([*answer, token_id])
                except Forbidden:
                    found[token_id] = False
        return found

    return allowed


class Forbidden(Exception):
    """The last token goes on after a marker in a way that the grammar forbids."""


class _Reading:
    def __init__(self, grammar: Grammar, compiled: CompiledGrammar) -> None:
        assert grammar.triggers is not None
        self.triggers, self.compiled = grammar.triggers, compiled
        self.markers = [str(marker[0]).encode() for marker in grammar.triggers.markers]
        self.thoughts = [str(marker[0]).encode() for marker in grammar.triggers.reasoning or ()]
        self.text = b""  # since the start, the end of the reasoning, or the end of the grammar's last text
        self.is_thinking = grammar.triggers.starts_inside
        self.may_think = bool(self.thoughts)

    def read(self, answer: Sequence[int]) -> Any:
        """The matcher at the end of an answer; None outside of the grammar's texts."""
        matcher = None
        for token_id in answer:
            if matcher is not None:
                assert matcher.consume_token(token_id)
            else:
                self.text += token_texts()[token_id]
                matcher = self._matcher()
            if matcher is not None and matcher.is_stopped():
                matcher, self.text = None, b""
        return matcher

    def _matcher(self) -> Any:
        start = self.text.lstrip()
        if self.may_think and start and not self.is_thinking:
            self.may_think = False
            if start.startswith(self.thoughts[0]):
                self.is_thinking, self.text = True, start[len(self.thoughts[0]) :]
        if self.is_thinking:
            _, found, after = self.text.partition(self.thoughts[1])
            if not found:
                return None
            self.is_thinking = self.may_think = False
            self.text = after
        text = self.text.lstrip() if self.triggers.at_start else self.text
        ends = sorted((text.find(marker) + len(marker), marker) for marker in self.markers if marker in text)
        if not ends or (self.triggers.at_start and ends[0][0] > len(ends[0][1])):
            return None
        end, marker = ends[0]
        matcher = self.compiled.root.deep_copy()
        for character in (marker + text[end:]).decode():
            if not matcher.try_consume_tokens([token_texts().index(character.encode())]):
                raise Forbidden
        return matcher


def allowed_by(grammar: Grammar | None) -> AllowedNow:
    """What a grammar allows after an answer that only ever grows."""
    if grammar is None:
        return lambda answer: None
    if grammar.triggers is not None:
        return _allowed_by_lazy(grammar)
    matcher = compiler()._compile(replace(grammar, after_ids=())).root.deep_copy()
    num_fed = 0

    def allowed(answer: Sequence[int]) -> np.ndarray | None:
        nonlocal num_fed
        begin = _end_of_marker(answer, grammar.after_ids)
        if begin is None:
            return None
        for token_id in answer[begin + num_fed :]:
            assert matcher.consume_token(token_id), matcher.get_error()
            num_fed += 1
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        return np.unpackbits(bits, bitorder="little")[:VOCAB_SIZE].astype(bool)

    return allowed


def _end_of_marker(answer: Sequence[int], marker: Sequence[int]) -> int | None:
    ends = range(len(marker), len(answer) + 1)
    return next((end for end in ends if tuple(answer[end - len(marker) : end]) == tuple(marker)), None)
