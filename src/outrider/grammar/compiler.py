"""Owns the compilation of grammars: the grammar child checks each, then it is compiled once for all rows."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from outrider.answer_form import Grammar
from outrider.grammar.backend import TokenizerSource, new_matcher
from outrider.grammar.checker import GrammarChecker
from outrider.grammar.lazy import LazyRowGrammar
from outrider.grammar.matcher import CompiledGrammar, RowGrammar
from outrider.grammar.triggers import CompiledTriggers, TokenTexts
from outrider.isolation.stacks import run_with_stack

MIB = 1 << 20
MAX_CACHED = 64  # compiled grammars; chosen by hand
MAX_CACHED_BYTES = 256 * MIB  # of all of them, without lexer states (at most 16 MB each); chosen by hand
BYTES_PER_CHARACTER = 150  # of a compiled grammar, where its size cannot be measured; measured for schemas
COMPILE_STACK_BYTES = 64 * MIB  # four times the grammar child's: a grammar that fits there fits here


class GrammarCompiler:
    """Thread-safe. The tokenizer's tables take a while to build, so the first grammar builds them."""

    def __init__(self, source: Callable[[], TokenizerSource]) -> None:
        self._new_source = source
        self._source_lock = threading.Lock()
        self._source: TokenizerSource | None = None
        self._tokenizer: Any = None
        self._tokenizer_lock = threading.Lock()
        self._checker = GrammarChecker(self._get_source)
        self._compiled: OrderedDict[Grammar, tuple[CompiledGrammar, int]] = OrderedDict()
        self._compiled_lock = threading.Lock()  # never held during a compilation
        self._texts: TokenTexts | None = None
        self._triggers: OrderedDict[Grammar, CompiledTriggers] = OrderedDict()

    def new_row(self, grammar: Grammar) -> RowGrammar | LazyRowGrammar:
        """Raise InvalidRequest, with the reason, if this grammar cannot be used."""
        compiled = self._compile(Grammar(grammar.kind, grammar.text))
        source = self._get_source()
        eos_ids = frozenset(source.eos_ids)
        if grammar.triggers is None:
            return RowGrammar(compiled, source.vocab_size, eos_ids, grammar.after_ids)
        triggers = self._compile_triggers(grammar, compiled)
        row = RowGrammar(compiled, source.vocab_size, eos_ids, mask_after_end=triggers.mask_after_call)
        return LazyRowGrammar(row, triggers)

    def close(self) -> None:
        """End the grammar child."""
        self._checker.close()

    def _compile(self, key: Grammar) -> CompiledGrammar:
        with self._compiled_lock:
            if key in self._compiled:
                self._compiled.move_to_end(key)
                return self._compiled[key][0]
        # Without the lock: other requests must not wait for this one.
        if self._tokenizer is None:  # built here while the grammar child starts
            threading.Thread(target=self._get_tokenizer, name="outrider-grammar-tables", daemon=True).start()
        num_bytes = self._checker.check(key) or BYTES_PER_CHARACTER * len(key.text)
        tokenizer = self._get_tokenizer()
        compiled = CompiledGrammar(
            lambda: run_with_stack(COMPILE_STACK_BYTES, lambda: new_matcher(tokenizer, key))
        )
        with self._compiled_lock:
            self._compiled[key] = compiled, num_bytes + len(key.text)
            self._drop_oldest()
        return compiled

    def _compile_triggers(self, grammar: Grammar, compiled: CompiledGrammar) -> CompiledTriggers:
        with self._compiled_lock:
            if grammar in self._triggers:
                self._triggers.move_to_end(grammar)
                return self._triggers[grammar]
        assert grammar.triggers is not None
        found = CompiledTriggers(grammar.triggers, self._get_texts(), compiled.new_matcher)
        with self._compiled_lock:
            self._triggers[grammar] = found
            if len(self._triggers) > MAX_CACHED:
                self._triggers.popitem(last=False)
        return found

    def _get_texts(self) -> TokenTexts:
        tokenizer, source = self._get_tokenizer(), self._get_source()
        with self._tokenizer_lock:
            if self._texts is None:
                self._texts = TokenTexts(tokenizer, source.vocab_size)
            return self._texts

    def _drop_oldest(self) -> None:
        num_bytes = sum(size for _, size in self._compiled.values())
        while len(self._compiled) > MAX_CACHED or (num_bytes > MAX_CACHED_BYTES and len(self._compiled) > 1):
            _, (_, size) = self._compiled.popitem(last=False)
            num_bytes -= size

    def _get_source(self) -> TokenizerSource:
        with self._source_lock:
            if self._source is None:
                self._source = self._new_source()
            return self._source

    def _get_tokenizer(self) -> Any:
        with self._tokenizer_lock:
            if self._tokenizer is None:
                self._tokenizer = self._get_source().build()
            return self._tokenizer
