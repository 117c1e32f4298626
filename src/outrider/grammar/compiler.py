"""Owns the compilation of grammars: each is compiled once, and each row gets a copy of the matcher."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from outrider.grammar.matcher import RowGrammar
from outrider.request import Grammar, InvalidRequest

MAX_CACHED = 64  # compiled grammars; chosen by hand


class GrammarCompiler:
    """Thread-safe. The tokenizer's tables take about a second to build, so the first grammar builds them."""

    def __init__(self, build_tokenizer: Callable[[], Any], eos_ids: frozenset[int]) -> None:
        self._build_tokenizer = build_tokenizer
        self._eos_ids = eos_ids
        self._tokenizer: Any = None
        self._compiled: OrderedDict[Grammar, Any] = OrderedDict()
        self._compiled_lock = threading.Lock()  # never held during a compilation
        self._tokenizer_lock = threading.Lock()

    def new_row(self, grammar: Grammar) -> RowGrammar:
        """Raise InvalidRequest, with the compiler's message, if this grammar cannot be used."""
        return RowGrammar(self._compile(grammar).deep_copy(), self._eos_ids, grammar.after_ids)

    def _compile(self, grammar: Grammar) -> Any:
        key = Grammar(grammar.kind, grammar.text)
        with self._compiled_lock:
            matcher = self._compiled.get(key)
        if matcher is None:
            matcher = self._new_matcher(key)  # without the lock: other requests must not wait for this one
        with self._compiled_lock:
            self._compiled[key] = matcher
            self._compiled.move_to_end(key)
            if len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)
        return matcher

    def _new_matcher(self, grammar: Grammar) -> Any:
        from llguidance import LLMatcher

        with self._tokenizer_lock:
            if self._tokenizer is None:
                self._tokenizer = self._build_tokenizer()
        definition = _definition(grammar)
        problem = LLMatcher.validate_grammar(definition, self._tokenizer)
        if problem:
            raise InvalidRequest(f"the {grammar.kind} grammar cannot be used: {problem}")
        matcher = LLMatcher(self._tokenizer, definition)
        if matcher.is_error():
            raise InvalidRequest(f"the {grammar.kind} grammar cannot be used: {matcher.get_error()}")
        if not RowGrammar(matcher.deep_copy(), self._eos_ids).can_begin():
            raise InvalidRequest(f"the {grammar.kind} grammar allows only an empty answer")
        return matcher


def build_tokenizer(tokenizer: Any, vocab_size: int, eos_ids: frozenset[int]) -> Any:
    """llguidance's form of a Hugging Face tokenizer, over the model's whole vocabulary."""
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
