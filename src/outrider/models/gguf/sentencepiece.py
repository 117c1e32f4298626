"""Builds a `tokenizers` backend for SentencePiece BPE vocabularies (GGUF's tokenizer model "llama").

Owns the conversion of pieces and scores into merges. Must not know GGUF's metadata keys.

SentencePiece repeatedly joins the two neighbouring pieces whose union has the best score, the leftmost pair
among equals. A ranked list of merges gives the same result if the list is sorted by the score of the union
and holds every cut of each piece into two pieces of the vocabulary.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, normalizers

SPACE = "▁"


def backend(
    tokens: Sequence[str], pieces: Sequence[str | None], scores: Sequence[float], prefixes_space: bool
) -> Tokenizer:
    """`pieces`: the tokens that ordinary text can produce, with None in the place of the other tokens."""
    vocab = {token: index for index, token in enumerate(tokens)}
    ids = {piece: index for index, piece in enumerate(pieces) if piece is not None}
    merges: list[tuple[str, str]] = []
    for piece in sorted(ids, key=lambda piece: -scores[ids[piece]]):
        cuts = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        known = [(left, right) for left, right in cuts if left in ids and right in ids]
        merges += sorted(known, key=lambda cut: (ids[cut[0]], ids[cut[1]]))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True))
    prepend = [normalizers.Prepend(SPACE)] if prefixes_space else []
    strip = [decoders.Strip(content=" ", left=1)] if prefixes_space else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", SPACE)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer
