"""The tokenizer of a pooling model: texts and pairs to ids, with the special tokens that the model expects.

The truncation and padding in tokenizer.json are switched off: they are those of the model's training.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Encoding, Tokenizer

from outrider.models.errors import ModelUnavailable
from outrider.pooling import PairPrompt, TokenInput

FILE_NAME = "tokenizer.json"


class EmbeddingTokenizer:
    """Not for two threads at once."""

    def __init__(self, tokenizer: Tokenizer, prompt: PairPrompt | None = None) -> None:
        """`prompt`: in which the model reads a pair; None: it reads pairs with special tokens."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._prompt = prompt

    def encode(self, text: str, most: int | None = None, with_special: bool = True) -> TokenInput:
        """`most`: cut the text so that the input, special tokens included, has at most so many tokens."""
        return self._finished(
            self._tokenizer.encode(text, add_special_tokens=False), None, most, with_special
        )

    def encode_pair(self, first: str, second: str, most: int | None = None) -> TokenInput:
        """A pair as a reranker reads it. `most`: the second text is cut."""
        if self._prompt is not None:
            return self._prompted(self._prompt, first, second, most)
        both = (self._tokenizer.encode(text, add_special_tokens=False) for text in (first, second))
        return self._finished(next(both), next(both), most)

    def _prompted(self, prompt: PairPrompt, query: str, document: str, most: int | None) -> TokenInput:
        pair = f"{prompt.before_query}{query}{prompt.before_document}{document}"
        before, ids, after = (
            self._tokenizer.encode(text, add_special_tokens=False).ids
            for text in (prompt.before, pair, prompt.after)
        )
        if most is not None:
            ids = ids[: max(0, most - len(before) - len(after))]
        return TokenInput((*before, *ids, *after))

    def _finished(
        self, text: Encoding, pair: Encoding | None, most: int | None, with_special: bool = True
    ) -> TokenInput:
        if most is not None:
            num_special = self._tokenizer.num_special_tokens_to_add(pair is not None) if with_special else 0
            num_others = num_special + (len(text.ids) if pair is not None else 0)
            (text if pair is None else pair).truncate(max(0, most - num_others))
        whole = self._tokenizer.post_process(text, pair, add_special_tokens=with_special)
        return TokenInput(tuple(whole.ids), tuple(whole.type_ids) if pair is not None else ())

    # -- as api/logprobs.py asks a tokenizer --------------------------------------------------------------

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True, **_: Any) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def convert_ids_to_tokens(self, token_id: int) -> str | None:
        token: str | None = self._tokenizer.id_to_token(token_id)
        return token


def load_tokenizer(folder: Path, prompt: PairPrompt | None = None) -> EmbeddingTokenizer:
    """`prompt`: in which the model reads pairs."""
    file = folder / FILE_NAME
    if not file.is_file():
        raise ModelUnavailable(
            f"{folder} has no {FILE_NAME}: embedding models need this form of their tokenizer."
        )
    try:
        return EmbeddingTokenizer(Tokenizer.from_file(str(file)), prompt)
    except Exception as error:  # the tokenizers library raises bare Exceptions
        raise ModelUnavailable(f"{file} cannot be read: {error}. Download the model again.") from None
