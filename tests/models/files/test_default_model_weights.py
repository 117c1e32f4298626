"""The real default model: weights, answers and tokenizer. Skipped if the model cannot be downloaded."""

import json
from itertools import islice
from pathlib import Path

import converted
import gguf_reference
import mlx.core as mx
import numpy as np
import pytest
from bpe_reference import DIGIT, GPT2_WORDS, ReferenceBPE
from mlx_lm.utils import load_tokenizer
from tokenizer_texts import MARKER_TEXTS, TEXTS, corpus

from outrider.models.files import default_model
from outrider.models.gguf import header
from patience import in_test_or_soak

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
REFERENCE_IDS = Path(__file__).parent / "smollm2_reference_ids.json"
CORPUS_BYTES = in_test_or_soak(1_000_000, 4_000_000)


@pytest.fixture(scope="module")
def tokenizer(default_model_folder):
    return load_tokenizer(default_model_folder)._tokenizer


@pytest.fixture(scope="module")
def reference(default_gguf) -> ReferenceBPE:
    metadata = header.read_header(default_gguf).metadata
    return ReferenceBPE(
        metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"], cuts=[DIGIT, GPT2_WORDS]
    )


def as_text(tokenizer, text: str) -> list[int]:
    """Encode text as the server encodes a user's text."""
    return tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)


@pytest.fixture(scope="module")
def model(default_model_folder):
    return converted.load(default_model_folder)


@pytest.fixture(scope="module")
def prompt_ids(tokenizer) -> list[int]:
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False)
    return tokenizer.encode(prompt, add_special_tokens=False)


def test_logits_equal_an_independent_dequantisation(model, default_gguf, prompt_ids):
    expected = gguf_reference.logits(*gguf_reference.read(default_gguf), prompt_ids[-16:])
    assert np.abs(converted.logits(model, prompt_ids[-16:]) - expected).max() < 1e-3


def test_it_knows_the_capital_of_france(model, tokenizer, prompt_ids):
    assert "Paris" in tokenizer.decode(converted.continue_greedily(model, prompt_ids, 8))


def test_the_folder_is_small_and_of_one_float_dtype(default_model_folder):
    weights = mx.load(str(default_model_folder / "model.safetensors"))
    assert {array.dtype for array in weights.values()} == {mx.uint32, mx.float16}
    assert (default_model_folder / "model.safetensors").stat().st_size < 99_000_000


def test_generation_ends_at_the_end_of_a_turn(default_model_folder, tokenizer):
    for name in ("config.json", "generation_config.json"):
        assert json.loads((default_model_folder / name).read_text())["eos_token_id"] == [2, 0]
    assert tokenizer.convert_ids_to_tokens([2, 0]) == ["<|im_end|>", "<|endoftext|>"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert default_model.is_cached()


def test_the_chat_template_adds_no_system_prompt(tokenizer):
    plain = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False)
    assert plain == ("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    told = tokenizer.apply_chat_template(
        [{"role": "system", "content": "Be brief."}, *QUESTION], tokenize=False
    )
    assert told == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
    )


def test_markers_in_a_rendered_template_are_single_tokens(tokenizer):
    ids = tokenizer.encode("<|im_start|>user\nHi<|im_end|>\n", add_special_tokens=False)
    assert ids == [1, 4093, 198, 26843, 2, 198]


@pytest.mark.parametrize("text", MARKER_TEXTS)
def test_markers_in_user_text_stay_text(tokenizer, text):
    ids = as_text(tokenizer, text)
    assert min(ids) > 16  # the 17 control tokens come first
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_encoding_equals_the_committed_reference(tokenizer):
    committed = json.loads(REFERENCE_IDS.read_text(encoding="utf-8"))
    assert [text for text, _ in committed] == [*TEXTS, *MARKER_TEXTS]
    for text, ids in committed:
        assert as_text(tokenizer, text) == ids, text


def test_the_committed_reference_is_what_plain_python_gives(reference):
    for text, ids in json.loads(REFERENCE_IDS.read_text(encoding="utf-8")):
        assert reference.encode(text) == ids, text


def test_library_sources_encode_as_the_reference(tokenizer, reference):
    for text in islice(corpus(400_000), 20):
        assert as_text(tokenizer, text) == reference.encode(text)


@pytest.mark.soak
def test_a_large_corpus_survives_encoding_and_decoding(tokenizer):
    texts = [*corpus(CORPUS_BYTES), *TEXTS]
    assert sum(len(text.encode()) for text in texts) > CORPUS_BYTES / 2
    for text in texts:
        assert tokenizer.decode(as_text(tokenizer, text)) == text
