"""Log-probabilities of a prompt's tokens: those of mlx-lm's own model, however the prompt is computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from outrider import LLM, InvalidRequest, SamplingParams
from outrider.llm import Completion
from outrider.request import MAX_PROMPT_LOGPROBS
from outrider.step import prompt_logprobs
from tiny_models import VOCAB_SIZE, write_checkpoint

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
ASKING = replace(GREEDY, prompt_logprobs=3, draft_depth=3)
PROMPT = [(7 * i * i + 3 * i + 5) % VOCAB_SIZE for i in range(90)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, nn.Module]]:
    folder = tmp_path_factory.mktemp("tiny-llama")
    model = write_checkpoint(folder, "llama")
    with LLM(folder, max_rows=3, drafter="ngram", prefill_step_size=20) as llm:
        yield llm, model


def assert_right(out: Completion, model: nn.Module, prompt: list[int], num_top: int = 3) -> None:
    logits = model(mx.array([prompt]))[0].astype(mx.float32)
    logprobs = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    assert out.prompt_logprobs is not None
    assert len(out.prompt_logprobs) == len(prompt)
    assert out.prompt_logprobs[0] is None
    for place, found in enumerate(out.prompt_logprobs[1:], 1):
        assert found is not None
        assert found.token_id == prompt[place]
        assert found.logprob == pytest.approx(logprobs[place - 1, prompt[place]], abs=1e-4)
        best = np.sort(logprobs[place - 1])[::-1][:num_top]
        np.testing.assert_allclose([value for _, value in found.top], best, atol=1e-4)


@pytest.mark.parametrize("at_once", [64, 7], ids=["one part", "several parts"])
def test_they_are_the_models_own(
    made: tuple[LLM, nn.Module], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_logprobs, "TOKENS_AT_ONCE", at_once)
    llm, model = made
    (plain,) = llm.generate(PROMPT, GREEDY)
    (out,) = llm.generate(PROMPT, ASKING)
    assert_right(out, model, PROMPT)
    assert out.token_ids == plain.token_ids
    assert plain.prompt_logprobs is None


def test_a_prompt_that_is_cached_is_computed_again(made: tuple[LLM, nn.Module]) -> None:
    llm, model = made
    llm.generate(PROMPT, GREEDY)
    (out,) = llm.generate(PROMPT, ASKING)
    assert out.stats.num_cached == 0
    assert_right(out, model, PROMPT)
    (after,) = llm.generate(PROMPT, GREEDY)
    assert after.stats.num_cached > 0


def test_rows_of_a_batch_have_their_own(made: tuple[LLM, nn.Module]) -> None:
    llm, model = made
    prompts = [PROMPT[:50], PROMPT[10:11], PROMPT[30:70], PROMPT[5:]]
    params = [ASKING, replace(ASKING, prompt_logprobs=0), GREEDY, replace(ASKING, logprobs=2)]
    outs = llm.generate(prompts, params)
    assert_right(outs[0], model, prompts[0])
    assert outs[1].prompt_logprobs == [None]
    assert outs[2].prompt_logprobs is None
    assert_right(outs[3], model, prompts[3])
    assert outs[3].logprobs is not None


def test_a_stream_has_them_once(made: tuple[LLM, nn.Module]) -> None:
    llm, _ = made
    deltas = list(llm.stream(PROMPT[:30], ASKING))
    assert [len(delta.prompt_logprobs) for delta in deltas if delta.prompt_logprobs] == [30]


def test_long_prompts_are_refused(made: tuple[LLM, nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = made
    monkeypatch.setattr("outrider.engine.validation.MAX_PROMPT_LOGPROBS", 40)
    with pytest.raises(InvalidRequest, match="at most 40 tokens, and this one has 41"):
        llm.generate(PROMPT[:41], ASKING)
    assert MAX_PROMPT_LOGPROBS >= 4096
