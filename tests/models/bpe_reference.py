"""Byte-level BPE in plain Python: cut the text into words, merge the best pair of each until none is left."""

import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import regex
from gguf_writer import byte_letters

GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DIGIT = r"\p{N}"
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_WORDS = QWEN2_WORDS.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


class ReferenceBPE:
    """`cuts` are applied in turn: each splits what the one before left whole, keeping matches and gaps."""

    def __init__(
        self,
        tokens: Sequence[str],
        merges: Sequence[str],
        cuts: Sequence[str],
        takes_whole_words: bool = False,
        is_nfc: bool = False,
    ) -> None:
        self._ids = {token: index for index, token in enumerate(tokens)}
        self._ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        self._cuts = [regex.compile(cut) for cut in cuts]
        self._takes_whole_words = takes_whole_words
        self._is_nfc = is_nfc
        self._letters = byte_letters()
        self._word_ids = lru_cache(maxsize=100_000)(self._merge)

    def encode(self, text: str) -> list[int]:
        words = [unicodedata.normalize("NFC", text) if self._is_nfc else text]
        for cut in self._cuts:
            words = [piece for word in words for piece in _pieces(cut, word)]
        return [index for word in words for index in self._word_ids(word)]

    def _merge(self, word: str) -> list[int]:
        parts = [self._letters[byte] for byte in word.encode()]
        if self._takes_whole_words and "".join(parts) in self._ids:
            return [self._ids["".join(parts)]]
        while True:
            pairs = [(self._ranks.get(pair), at) for at, pair in enumerate(pairwise(parts))]
            ranked = [pair for pair in pairs if pair[0] is not None]
            if not ranked:
                return [self._ids[part] for part in parts]
            _, at = min(ranked)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]


def _pieces(cut: regex.Pattern, text: str) -> list[str]:
    pieces, at = [], 0
    for match in cut.finditer(text):
        pieces += [text[at : match.start()], match.group()]
        at = match.end()
    return [piece for piece in [*pieces, text[at:]] if piece]
