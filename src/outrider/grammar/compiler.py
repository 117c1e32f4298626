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
        self._lock = threading.Lock()

    def check(self, grammar: Grammar) -> None:
        """Raise InvalidRequest, with the compiler's words, if this grammar cannot be honoured."""
        self._compile(grammar)

    def new_row(self, grammar: Grammar) -> RowGrammar:
        return RowGrammar(self._compile(grammar).deep_copy(), grammar.after_ids)

    def _compile(self, grammar: Grammar) -> Any:
        key = Grammar(grammar.kind, grammar.text)
        with self._lock:
            if key not in self._compiled:
                self._compiled[key] = self._new_matcher(key)
                if len(self._compiled) > MAX_CACHED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(key)
            return self._compiled[key]

    def _new_matcher(self, grammar: Grammar) -> Any:
        from llguidance import LLMatcher

        if self._tokenizer is None:
            self._tokenizer = self._build_tokenizer()
        definition = _definition(grammar)
        problem = LLMatcher.validate_grammar(definition, self._tokenizer)
        if problem:
            raise InvalidRequest(f"the {grammar.kind} grammar cannot be used: {problem}")
        matcher = LLMatcher(self._tokenizer, definition)
        if matcher.is_error():
            raise InvalidRequest(f"the {grammar.kind} grammar cannot be used: {matcher.get_error()}")
        if not RowGrammar(matcher.deep_copy()).can_begin(self._eos_ids):
            raise InvalidRequest(f"the {grammar.kind} grammar allows nothing but an empty answer")
        return matcher


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
