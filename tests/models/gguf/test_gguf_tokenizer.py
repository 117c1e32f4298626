import io
import json
from itertools import islice

import pytest
import sentencepiece
import tokenizers
from bpe_reference import DIGIT, GPT2_WORDS, LLAMA3_WORDS, QWEN2_WORDS, ReferenceBPE
from gguf_writer import byte_letters, tiny_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_texts import MARKER_TEXTS, TEXTS, corpus

from outrider.models.errors import UnreadableGGUF
from outrider.models.gguf import tokenizer as gguf_tokenizer
from outrider.models.gguf.header import Header

REFERENCES = {
    "gpt-2": {"cuts": [GPT2_WORDS]},
    "smollm": {"cuts": [DIGIT, GPT2_WORDS]},
    "qwen2": {"cuts": [QWEN2_WORDS], "is_nfc": True},
    "llama-bpe": {"cuts": [LLAMA3_WORDS], "takes_whole_words": True},
}


@pytest.fixture(scope="session")
def trained() -> tuple[list[str], list[str]]:
    """Tokens and merges of a small byte-level vocabulary, learned from library sources."""
    learner = tokenizers.Tokenizer(tokenizers.models.BPE())
    learner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=1500, initial_alphabet=list(byte_letters().values()), show_progress=False
    )
    learner.train_from_iterator([*corpus(300_000), *TEXTS], trainer)
    vocab = learner.get_vocab()
    merges = json.loads(learner.to_str())["model"]["merges"]
    return sorted(vocab, key=lambda token: vocab[token]), [" ".join(pair) for pair in merges]


def header(trained, pre, **more) -> Header:
    tokens, merges = trained
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, "<|im_end|>", "<tool>", "<s>"],
        "tokenizer.ggml.token_type": [1] * len(tokens) + [3, 4, 3],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(tokens) + 2,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }
    return Header(metadata, {})


def encode(tokenizer, text):
    return tokenizer.backend.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("pre", REFERENCES)
def test_encoding_equals_the_reference(trained, pre):
    tokenizer = gguf_tokenizer.from_header(header(trained, pre))
    reference = ReferenceBPE(*trained, **REFERENCES[pre])
    for text in [*TEXTS, *islice(corpus(100_000), 8)]:
        assert encode(tokenizer, text) == reference.encode(text), text[:80]


@pytest.mark.parametrize("pre", [pre for pre in gguf_tokenizer.PRE_TOKENIZERS if "qwen" not in pre])
def test_text_survives_encoding_and_decoding(trained, pre):
    tokenizer = gguf_tokenizer.from_header(header(trained, pre))
    for text in [*TEXTS, *MARKER_TEXTS, *islice(corpus(100_000), 4)]:
        assert tokenizer.backend.decode(encode(tokenizer, text), skip_special_tokens=False) == text


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=60))
def test_any_text_survives_byte_level_encoding(text):
    tokenizer = BYTES
    assert tokenizer.backend.decode(encode(tokenizer, text), skip_special_tokens=False) == text


BYTES = gguf_tokenizer.from_header(Header(tiny_tokenizer(300) | {"tokenizer.ggml.pre": "smollm"}, {}))


def test_control_tokens_are_special_and_user_defined_ones_are_text(trained):
    tokenizer = gguf_tokenizer.from_header(header(trained, "smollm"))
    ids = encode(tokenizer, "<tool><|im_end|>")
    assert [tokenizer.backend.id_to_token(index) for index in ids] == ["<tool>", "<|im_end|>"]
    assert tokenizer.backend.decode(ids, skip_special_tokens=True) == "<tool>"


@pytest.mark.parametrize(
    ("pre", "more", "begins"),
    [
        ("smollm", {}, False),
        ("llama-bpe", {}, True),
        ("llama-bpe", {"add_bos_token": False}, False),
        ("smollm", {"add_bos_token": True}, True),
    ],
)
def test_bos_is_added_where_the_model_wants_it(trained, pre, more, begins):
    tokenizer = gguf_tokenizer.from_header(header(trained, pre, **more))
    ids = tokenizer.backend.encode("hello").ids
    assert (ids[0] == tokenizer.bos_id) is begins


def test_eos_ids_are_the_files_own_then_the_other_ends(trained):
    first = len(trained[0])
    tokenizer = gguf_tokenizer.from_header(header(trained, "smollm", eos_token_id=7, eot_token_id=9))
    assert tokenizer.eos_ids == (7, 9, first)
    assert tokenizer.special_ids() == {"bos_token_id": first + 2, "eos_token_id": [7, 9, first]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "martian"}, "'martian' is not supported"),
        ({"pre": None}, "does not name its pre-tokenizer"),
        ({"model": "rwkv"}, "'rwkv' is not supported"),
        ({"tokens": None}, "lacks tokenizer.ggml.tokens"),
        ({"merges": None}, "lacks tokenizer.ggml.merges"),
        ({"merges": ["nope nada"]}, "do not fit together"),
        ({"token_type": [1]}, "one type each"),
    ],
)
def test_a_tokenizer_that_cannot_be_rebuilt_is_refused(changes, message):
    metadata = tiny_tokenizer(300)
    for key, value in changes.items():
        metadata[f"tokenizer.ggml.{key}"] = value
    with pytest.raises(UnreadableGGUF, match=message):
        gguf_tokenizer.from_header(Header(metadata, {}))


@pytest.fixture(scope="session", params=[True, False], ids=["prefix", "no prefix"])
def pieces(request) -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    lines = [line for text in corpus(200_000) for line in text.splitlines() if line.strip()]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type="bpe",
        vocab_size=1200,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        add_dummy_prefix=request.param,
        num_threads=1,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    processor.has_prefix = request.param
    return processor


def sentencepiece_header(pieces) -> Header:
    def kind(index: int) -> int:
        return (
            2
            if pieces.is_unknown(index)
            else 3
            if pieces.is_control(index)
            else 6
            if pieces.is_byte(index)
            else 1
        )

    ids = range(pieces.get_piece_size())
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [pieces.id_to_piece(index) for index in ids],
        "tokenizer.ggml.scores": [pieces.get_score(index) for index in ids],
        "tokenizer.ggml.token_type": [kind(index) for index in ids],
        "tokenizer.ggml.add_space_prefix": pieces.has_prefix,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return Header(metadata, {})


def test_sentencepiece_vocabularies_encode_as_the_original_library(pieces):
    tokenizer = gguf_tokenizer.from_header(sentencepiece_header(pieces))
    for text in [*TEXTS, *islice(corpus(60_000), 5)]:
        ids = encode(tokenizer, text)
        assert ids == pieces.encode(text), text[:80]
        assert tokenizer.backend.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.backend.encode("a").ids[0] == 1
