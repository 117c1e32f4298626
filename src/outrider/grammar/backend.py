"""llguidance as the server and the grammar child both use it: tokenizer, parser limits, matchers."""

from __future__ import annotations

import copy
import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from outrider.answer_form import Grammar
from outrider.request import InvalidRequest

# Chosen by hand: 1,000 optional properties of an object take 4,000 items, and up to 50 ms (measured).
MAX_ITEMS_IN_ROW = 5_000
# About 0.5 KB each (measured). Rows that share a compiled grammar share the states; see RowGrammar.
MAX_LEXER_STATES = 32_000


@dataclass(frozen=True)
class TokenizerSource:
    """What llguidance needs of a tokenizer."""

    text: str  # tokenizer.json, with all added tokens
    vocab_size: int  # the model's: logits
    eos_ids: tuple[int, ...]

    def build(self) -> Any:
        """llguidance's tokenizer, over the model's vocabulary or the tokenizer's, whichever is larger."""
        from llguidance import LLTokenizer

        eos_ids = list(self.eos_ids)
        try:
            return LLTokenizer(self.text, n_vocab=self.vocab_size, eos_token=eos_ids)
        except ValueError:  # the tokenizer has more ids than the model
            return LLTokenizer(self.text, eos_token=eos_ids)


def tokenizer_source(tokenizer: Any, vocab_size: int, eos_ids: Collection[int]) -> TokenizerSource:
    """Of a Hugging Face tokenizer, which may be wrapped by mlx-lm."""
    backend = copy.copy(getattr(tokenizer, "backend_tokenizer", None))
    if backend is None:
        raise InvalidRequest("grammars need a fast tokenizer, and this model has a slow one")
    backend.no_padding()
    backend.no_truncation()
    return TokenizerSource(backend.to_str(), vocab_size, tuple(sorted(eos_ids)))


def new_matcher(tokenizer: Any, grammar: Grammar) -> Any:
    """Compile a grammar. Raises InvalidRequest with llguidance's message.

    llguidance recurses over the grammar: call this on a thread with a deep stack.
    """
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        max_items_in_row=MAX_ITEMS_IN_ROW, max_lexer_states=MAX_LEXER_STATES, verbose_errors=False
    )
    matcher = LLMatcher(tokenizer, _definition(grammar), log_level=0, limits=limits)
    if matcher.is_error():
        raise InvalidRequest(f"the {grammar.kind} grammar cannot be used: {error_of(matcher)}")
    return matcher


def error_of(matcher: Any) -> str:
    return str(matcher.get_error()).partition("\n<")[0][:500]


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
