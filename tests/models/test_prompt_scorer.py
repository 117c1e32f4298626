"""The scorer of prompts against attention that is written out here."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from outrider.config import InvalidConfig
from outrider.models.prompt_scorer import NUM_QUERIES, PromptScorer
from outrider.models.trunk import Trunk
from tiny_models import VOCAB_SIZE, quantized_tiny_model, tiny_model

PROMPT = [(7 * i * i + 3 * i + 5) % VOCAB_SIZE for i in range(150)]


def expected_scores(trunk: Trunk, num_layers: int) -> np.ndarray:
    """The most that a head attends from one of the last tokens, in the last of so many layers."""
    h = trunk.embed(mx.array([PROMPT]))
    *before, last = trunk.model.layers[:num_layers]
    for layer in before:
        h = layer(h, "causal", None)
    own, x = last.self_attn, last.input_layernorm(h)
    heads = [
        own.rope(project(x).reshape(1, len(PROMPT), -1, 16).transpose(0, 2, 1, 3))[0]
        for project in (own.q_proj, own.k_proj)
    ]
    queries, keys = (np.array(each, np.float64) for each in heads)
    keys = np.repeat(keys, len(queries) // len(keys), axis=0)
    scores = queries[:, -NUM_QUERIES:] @ keys.transpose(0, 2, 1) / np.sqrt(16)
    places = np.arange(len(PROMPT))
    scores[:, places > places[-NUM_QUERIES:, None]] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return (weights / weights.sum(axis=-1, keepdims=True)).max(axis=(0, 1))


def read(scorer: PromptScorer, size: int) -> np.ndarray:
    for start in range(0, len(PROMPT), size):
        scorer.read(PROMPT[start : start + size], start, len(PROMPT))
    return scorer.scores()


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_scores_are_the_most_attention_of_the_last_tokens(num_layers: int) -> None:
    trunk = Trunk(tiny_model("llama"), max_context=256)
    expected = expected_scores(trunk, num_layers)
    trunk.prepare_for_serving()
    scorer = PromptScorer(trunk, num_layers)
    for size in (150, 64, 149, 17):
        assert np.allclose(read(scorer, size), expected, atol=1e-5)


def test_quantised_layers_score_and_stay_as_they_are() -> None:
    model, _ = quantized_tiny_model("llama-4bit")
    trunk = Trunk(model, max_context=256)
    expected = expected_scores(trunk, 2)
    trunk.prepare_for_serving()
    kinds = [type(module) for _, module in model.named_modules()]
    scorer = PromptScorer(trunk, 2)
    assert np.allclose(read(scorer, 64), expected, atol=2e-3)
    assert [type(module) for _, module in model.named_modules()] == kinds


def test_a_new_prompt_forgets_a_half_read_one() -> None:
    trunk = Trunk(tiny_model("llama"), max_context=256)
    scorer = PromptScorer(trunk)
    assert scorer.num_layers == 2  # a half of three
    expected = read(scorer, 50)
    scorer.read([1, 2, 3], 0, 200)
    assert np.array_equal(read(scorer, 50), expected)
    with pytest.raises(ValueError, match="has read 0 tokens"):
        scorer.read([1, 2, 3], 50, 200)


@pytest.mark.parametrize("num_layers", [0, 4])
def test_a_wrong_number_of_layers_is_refused(num_layers: int) -> None:
    with pytest.raises(InvalidConfig, match="from 1 to 3"):
        PromptScorer(Trunk(tiny_model("llama"), max_context=256), num_layers)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next", "gemma3_text"])
def test_a_model_whose_attention_is_of_another_form_is_refused(family: str) -> None:
    with pytest.raises(InvalidConfig, match="cannot score prompts"):
        PromptScorer(Trunk(tiny_model(family), max_context=256))
