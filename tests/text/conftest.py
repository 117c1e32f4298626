"""Small real tokenizers, one for each way in which decoders differ. Built here; nothing is downloaded."""

from collections.abc import Callable

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SPECIAL = "<|end|>"
LINES = [
    "The quick brown fox jumps over the lazy dog, don't you think?",
    "def main() -> None:\n    print('hello world')\n",
    "你好，世界。今天天气很好。 こんにちは世界",
    "smile 😀😀😃 family 👨‍👩‍👧 flag 🇩🇪 naïve café Straße",
] * 3
PIECES = ["▁", "▁▁", "▁the", "▁world", "▁he", "llo", "he", "l", "o", "w", "r", "d", "t", "h", "e", ".", "好"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level_bpe() -> Tokenizer:
    """GPT-2's way: every token is bytes, and may begin or end inside a character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[SPECIAL],
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


def llama_bpe() -> Tokenizer:
    """Llama 2's way: spaces are "▁", unknown characters are byte tokens, one leading space is stripped."""
    vocab = {piece: index for index, piece in enumerate(["<unk>", *BYTES, *PIECES])}
    model = models.BPE(vocab=vocab, merges=[("h", "e")], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([SPECIAL])
    return tokenizer


def metaspace_unigram() -> Tokenizer:
    """T5's way with byte fallback: the decoder drops the "▁" of the first token."""
    scored = [(piece, -float(len(piece) < 3)) for piece in PIECES]
    model = models.Unigram(
        [("<unk>", 0.0), *((byte, -9.0) for byte in BYTES), *scored], 0, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    tokenizer.add_special_tokens([SPECIAL])
    return tokenizer


def cleaning_word_piece() -> Tokenizer:
    """BERT's way: words are joined with spaces, "##" marks what continues one, " ." becomes "."."""
    pieces = ["[UNK]", "do", "n't", "not", "##ing", "##", "s", "'s", ".", ",", "wait", "it"]
    tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    tokenizer.add_special_tokens([SPECIAL])
    return tokenizer


def suffix_bpe() -> Tokenizer:
    """The first BPE's way: the token that ends a word says so, and the last token of all writes no space."""
    pieces = ["hel", "lo</w>", "wor", "ld</w>", "</w>", "x</w>"]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    tokenizer.add_special_tokens([SPECIAL])
    return tokenizer


def built_by(build: Callable[[], Tokenizer]) -> str:
    return build.__name__


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    return byte_level_bpe()


@pytest.fixture(scope="session", params=[llama_bpe, metaspace_unigram], ids=built_by)
def byte_fallback(request: pytest.FixtureRequest) -> Tokenizer:
    return request.param()


@pytest.fixture(scope="session", params=[byte_level_bpe, llama_bpe, metaspace_unigram], ids=built_by)
def any_text(request: pytest.FixtureRequest) -> Tokenizer:
    """Tokenizers that can encode every string."""
    return request.param()


@pytest.fixture(scope="session", params=[byte_level_bpe, cleaning_word_piece, suffix_bpe], ids=built_by)
def prefix_stable(request: pytest.FixtureRequest) -> Tokenizer:
    """Tokenizers whose text only grows, whatever the ids, but for a torn end."""
    return request.param()


EVERY = [byte_level_bpe, llama_bpe, metaspace_unigram, cleaning_word_piece, suffix_bpe]


@pytest.fixture(scope="session", params=EVERY, ids=built_by)
def every(request: pytest.FixtureRequest) -> Tokenizer:
    return request.param()
