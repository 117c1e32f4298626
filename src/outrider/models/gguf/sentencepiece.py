"""Builds a `tokenizers` backend for SentencePiece BPE vocabularies (GGUF's tokenizer model "llama").

Owns the conversion of pieces and scores into merges. Must not know GGUF's metadata keys.

SentencePiece repeatedly joins the two neighbouring pieces whose union has the best score, the leftmost pair
among equals. A ranked list of merges gives the same result if the list is sorted by the score of the union
and holds every cut of each piece into two pieces of the vocabulary.
"""

from collections.abc import Iterator, Sequence

from tokenizers import Tokenizer, decoders, models, normalizers

SPACE = "▁"


def backend(
    tokens: Sequence[str], pieces: Sequence[str | None], scores: Sequence[float], prefixes_space: bool
) -> Tokenizer:
    """`pieces`: the tokens that ordinary text can produce, with None in the place of the other tokens."""
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=_merges(pieces, scores), byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = _normalizer(prefixes_space)
    tokenizer.decoder = _decoder(prefixes_space)
    return tokenizer


def _merges(pieces: Sequence[str | None], scores: Sequence[float]) -> list[tuple[str, str]]:
    ids = {piece: index for index, piece in enumerate(pieces) if piece is not None}
    ranked = sorted(ids, key=lambda piece: -scores[ids[piece]])
    return [pair for piece in ranked for pair in _cuts(piece, ids)]


def _cuts(piece: str, ids: dict[str, int]) -> Iterator[tuple[str, str]]:
    cuts = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
    known = [(left, right) for left, right in cuts if left in ids and right in ids]
    return iter(sorted(known, key=lambda cut: (ids[cut[0]], ids[cut[1]])))


def _normalizer(prefixes_space: bool) -> normalizers.Normalizer:
    steps = [normalizers.Prepend(SPACE)] if prefixes_space else []
    return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])


def _decoder(prefixes_space: bool) -> decoders.Decoder:
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefixes_space:
        steps.append(decoders.Strip(content=" ", left=1))
    return decoders.Sequence(steps)
