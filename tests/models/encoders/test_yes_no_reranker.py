"""Qwen3-Reranker: the published prompt, the two logits of the last position, and which folders hold one."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tokenizers import Tokenizer

from outrider.api.rerank import _scores
from outrider.build_embedder import Embedder, build_embedder
from outrider.models.encoders.loading import kind_in, load_pooling_model
from outrider.models.errors import ModelUnavailable
from tiny_models import SPECIAL_TOKENS, tiny_model, write_checkpoint, write_tokenizer

SIZES: dict[str, Any] = {"vocab_size": 128, "max_position_embeddings": 1024}
NAME = "Qwen3-Reranker-tiny"
QUERY = "what is the capital of China?"
DOCUMENTS = ["Beijing.", "Gravity is a force {query} that attracts two bodies.", "x"]
# Written here once more, as the model card has it.
SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


def write_reranker(folder: Path, **changes: Any) -> Path:
    """A causal model whose tokenizer has the tokens "yes" and "no"."""
    write_checkpoint(folder, "qwen3", **SIZES, **changes)
    write_tokenizer(folder, (*SPECIAL_TOKENS, "yes", "no"))
    return folder


def published_ids(tokenizer: Tokenizer, document: str) -> list[int]:
    def ids(text: str) -> list[int]:
        found: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return found

    before = ids(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n")
    pair = ids(f"<Instruct>: {INSTRUCTION}\n<Query>: {QUERY}\n<Document>: {document}")
    return before + pair + ids("<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")


def expected_score(folder: Path, document: str) -> float:
    """mlx-lm's own model over the whole prompt, and NumPy's softmax over the logits of yes and no."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    logits = np.array(
        tiny_model("qwen3", **SIZES)(mx.array([published_ids(tokenizer, document)]))[0, -1], np.float64
    )
    no, yes = (np.exp(logits[tokenizer.token_to_id(word)]) for word in ("no", "yes"))
    return float(yes / (no + yes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reranker(tmp_path_factory.mktemp("models") / NAME)


async def scores_of(made: Embedder, documents: list[str], truncate: int | None = None) -> list[float]:
    pairs = await made.service.read_pairs(QUERY, documents, truncate, 10_000)
    return _scores(await made.service.embed(pairs), made.service.facts)


def test_scores_are_the_softmax_over_yes_and_no_after_the_published_prompt(folder: Path) -> None:
    made = build_embedder(folder, NAME)
    try:
        found = asyncio.run(scores_of(made, DOCUMENTS))
        assert (made.service.facts.kind, made.service.facts.dimensions) == ("reranker", 1)
    finally:
        made.close()
    expected = [expected_score(folder, document) for document in DOCUMENTS]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert len({round(score, 4) for score in expected}) == 3, "the documents must differ"


def test_a_long_document_is_cut_before_the_end_of_the_prompt(folder: Path) -> None:
    made = build_embedder(folder, NAME)
    try:
        (whole,) = asyncio.run(made.service.read_pairs(QUERY, ["abc"], None, 10_000))
        (cut,) = asyncio.run(made.service.read_pairs(QUERY, ["abcdef"], len(whole), 10_000))
    finally:
        made.close()
    assert cut == whole


def snapshot(folder: Path) -> Path:
    return folder / "models--Qwen--Qwen3-Reranker-0.6B" / "snapshots" / "0123abc"


def test_the_name_or_the_config_tells_a_reranker_from_a_chat_model(tmp_path: Path) -> None:
    assert kind_in(write_reranker(snapshot(tmp_path))) == "reranker"
    assert kind_in(write_reranker(tmp_path / "mine")) is None
    assert kind_in(write_reranker(tmp_path / "other", is_original_qwen3_reranker=True)) == "reranker"
    file = snapshot(tmp_path) / "config.json"
    for changes in ({"model_type": "llama"}, {"architectures": ["Qwen3ForSequenceClassification"]}):
        config = json.loads(file.read_text()) | changes
        (tmp_path / NAME).mkdir(exist_ok=True)
        (tmp_path / NAME / "config.json").write_text(json.dumps(config))
        assert kind_in(tmp_path / NAME) == (None if "model_type" in changes else "reranker")
    with pytest.raises(ModelUnavailable, match="'qwen3' models with a classification head"):
        load_pooling_model(tmp_path / NAME, NAME)


def test_a_tokenizer_without_the_answers_is_refused(tmp_path: Path) -> None:
    folder = write_reranker(tmp_path / NAME)
    write_tokenizer(folder)
    with pytest.raises(ModelUnavailable, match="no token 'yes'"):
        load_pooling_model(folder, NAME)
