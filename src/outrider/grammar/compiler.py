"""From a Grammar to a matcher: compiled once, checked before a request costs anything, copied a row."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from outrider.grammar.matcher import RowGrammar
from outrider.request import Grammar, InvalidRequest

MAX_CACHED = 64


class GrammarCompiler:
    """Thread-safe. The tokenizer's tables take about a second to build, so they are built on first use."""

    def __init__(self, build_tokenizer: Callable[[], Any], eos_ids: frozenset[int]) -> None:
        self._build_tokenizer = build_tokenizer
        self._eos_ids = eos_ids
        self._tokenizer: Any = None
        self._compiled: OrderedDict[Grammar, Any] = OrderedDict()
        self._lock = threading.Lock()  # of _compiled; never held for long
        self._building = threading.Lock()  # of _tokenizer

    def check(self, grammar: Grammar) -> None:
        """Raise InvalidRequest, with the compiler's words, if this grammar cannot be honoured."""
        self._compile(grammar)

    def new_row(self, grammar: Grammar) -> RowGrammar:
        return RowGrammar(self._compile(grammar).deep_copy(), self._eos_ids, grammar.after_ids)

    def _compile(self, grammar: Grammar) -> Any:
        key = Grammar(grammar.kind, grammar.text)
        with self._lock:
            matcher = self._compiled.get(key)
        if matcher is None:
            matcher = self._new_matcher(
                key
            )  # unlocked: the engine thread must not wait for a client's grammar
        with self._lock:
            self._compiled[key] = matcher
            self._compiled.move_to_end(key)
            if len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)
        return matcher

    def _new_matcher(self, grammar: Grammar) -> Any:
        from llguidance import LLMatcher

        tokenizer = self._tables()
        definition = _definition(grammar)
        problem = LLMatcher.validate_grammar(definition, tokenizer)
        if problem:
            raise InvalidRequest(f"the {grammar.kind} grammar cannot be used: {problem}")
        matcher = LLMatcher(tokenizer, definition)
        if matcher.is_error():
            raise InvalidRequest(f"the {grammar.kind} grammar cannot be used: {matcher.get_error()}")
        if not RowGrammar(matcher.deep_copy(), self._eos_ids).can_begin():
            raise InvalidRequest(f"the {grammar.kind} grammar allows nothing but an empty answer")
        return matcher

    def _tables(self) -> Any:
        """The tokenizer's, built by whoever comes first."""
        with self._building:
            if self._tokenizer is None:
                self._tokenizer = self._build_tokenizer()
            return self._tokenizer


def build_tokenizer(tokenizer: Any, vocab_size: int, eos_ids: frozenset[int]) -> Any:
    """llguidance's view of a Hugging Face tokenizer, over the model's whole vocabulary."""
    from llguidance.hf import from_tokenizer

    plain = getattr(tokenizer, "_tokenizer", tokenizer)
    return from_tokenizer(plain, n_vocab=vocab_size, eos_token=sorted(eos_ids))


def _definition(grammar: Grammar) -> str:
    from llguidance import grammar_from

    try:
        if grammar.kind == "json_object":
            return str(grammar_from("json_schema", '{"type": "object"}'))
        if grammar.kind == "json_schema":
            json.loads(grammar.text)
        return str(grammar_from(grammar.kind, grammar.text))
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the {grammar.kind} grammar cannot be read: {error}") from error
