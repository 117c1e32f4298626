"""Grammars for the rows of random histories, over a tokenizer in which a text can be cut in several sampling.

What a grammar allows is told by a matcher that is only ever fed: it never looks ahead, never steps back.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from outrider.grammar.backend import TokenizerSource, tokenizer_source
from outrider.grammar.compiler import GrammarCompiler
from outrider.request import Grammar, SamplingParams
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


def allowed_by(grammar: Grammar | None) -> AllowedNow:
    """What a grammar allows after an answer that only ever grows."""
    if grammar is None:
        return lambda answer: None
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
