"""Prompts of which tokens are skipped, through `LLM`: positions, neighbours, drafts, prefixes, refusals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.utils import load_model

from outrider import LLM, InvalidConfig, InvalidRequest, SamplingParams, SpecPrefill
from outrider.engine import scheduler
from outrider.engine.sequence import Sequence as Row
from outrider.llm import Completion, GenerationFailed
from outrider.models.prompt_scorer import PromptScorer
from outrider.request import Request
from outrider.speculate.prompt_selection import kept_positions
from server_process import write_tiny_model
from tiny_models import SPECIAL_TOKENS, write_checkpoint, write_tokenizer

PROMPT = [5 + i * i % 90 for i in range(300)]
OTHERS = [PROMPT[40:140], PROMPT[200:], [7, 8, 9]]
EXACT = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=0)
SKIPPING = replace(EXACT, spec_prefill=SpecPrefill(0.5))
HOT = replace(SKIPPING, temperature=1.0, seed=5)
KEPT = [*range(32), *range(70, 81), 100, *range(150, 161), *range(250, 300)]  # with gaps of several kinds


@pytest.fixture(scope="module", params=["llama", "llama-4bit"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", name=request.param)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, max_rows=4, prefill_step_size=64, spec_prefill_model="self") as llm:
        yield llm


def ask(llm: LLM, params: SamplingParams, prompt: Sequence[int] = PROMPT) -> Completion:
    (answer,) = llm.generate([prompt], params)
    return answer


def tokens_and_logprobs(answer: Completion) -> tuple[list[int], list[float]]:
    assert answer.logprobs is not None
    return answer.token_ids, [one.logprob for one in answer.logprobs]


class CacheWithPositions:
    """mlx-lm's cache of one layer, in which rope's position is not the number of cells."""

    def __init__(self) -> None:
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.offset = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.keys = keys if self.keys is None else mx.concatenate([self.keys, keys], axis=2)
        self.values = values if self.values is None else mx.concatenate([self.values, values], axis=2)
        return self.keys, self.values


def reference(model: nn.Module, token_ids: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """mlx-lm's log-probabilities after each token, fed one by one at these positions.  [tokens, vocab]"""
    caches = [CacheWithPositions() for _ in model.layers]
    found = []
    for token_id, position in zip(token_ids, positions, strict=True):
        for cache in caches:
            cache.offset = position
        logits = model(mx.array([[token_id]]), cache=caches)[0, -1].astype(mx.float32)
        found.append(np.array(logits - mx.logsumexp(logits)))
    return np.array(found)


# -- what is computed ------------------------------------------------------------------------------------


def test_to_keep_all_is_exact_to_the_bit(llm: LLM) -> None:
    exact = tokens_and_logprobs(ask(llm, EXACT))
    whole = ask(llm, replace(EXACT, spec_prefill=SpecPrefill(1.0)))
    assert tokens_and_logprobs(whole) == exact
    assert whole.stats.num_skipped == 0


def test_scores_that_keep_all_are_exact_to_the_bit(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "kept_positions", lambda scores, keep: range(len(scores)))
    assert tokens_and_logprobs(ask(llm, SKIPPING)) == tokens_and_logprobs(ask(llm, EXACT))


def test_kept_tokens_are_read_at_their_true_positions(
    llm: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "kept_positions", lambda scores, keep: KEPT)
    answer = ask(llm, SKIPPING)
    assert answer.stats.num_skipped == len(PROMPT) - len(KEPT)
    found = np.array(tokens_and_logprobs(answer)[1])
    model, _ = load_model(folder)
    fed = [*(PROMPT[position] for position in KEPT), *answer.token_ids[:-1]]
    after = range(len(PROMPT), len(PROMPT) + len(answer.token_ids) - 1)
    picked = (range(len(KEPT) - 1, len(fed)), answer.token_ids)
    expected = reference(model, fed, [*KEPT, *after])[picked]
    dense = reference(model, fed, range(len(fed)))[picked]
    tolerance = 1e-4 if folder_is_float(folder) else 0.02
    assert np.abs(found - expected).max() < tolerance
    assert np.abs(found - dense).max() > 5 * tolerance, "wrong positions would show"


def folder_is_float(folder: Path) -> bool:
    return "quantization" not in (folder / "config.json").read_text()


@pytest.mark.parametrize("params", [SKIPPING, HOT], ids=["greedy", "sampled"])
def test_drafts_do_not_change_the_answer(llm: LLM, params: SamplingParams) -> None:
    plain = ask(llm, replace(params, draft_depth=0))
    assert plain.stats.num_skipped > 100
    predicted = replace(params, prediction_ids=[*plain.token_ids[:4], 1, *plain.token_ids[4:]], draft_depth=4)
    by_head, by_prediction = ask(llm, replace(params, draft_depth=3)), ask(llm, predicted)
    assert plain.token_ids == by_head.token_ids == by_prediction.token_ids == ask(llm, params).token_ids
    assert sum(by_head.stats.drafted) > 0
    assert sum(by_prediction.stats.accepted) > 0


def test_neighbours_have_the_tokens_that_they_have_alone(llm: LLM) -> None:
    hot = replace(HOT, spec_prefill=None)
    each = [
        *((prompt, params) for prompt in OTHERS for params in (EXACT, hot)),
        (PROMPT, SKIPPING),
        (PROMPT, HOT),
    ]
    alone = [ask(llm, params, prompt).token_ids for prompt, params in each]
    for order in (each, each[::-1]):
        together = llm.generate([prompt for prompt, _ in order], [params for _, params in order])
        found = [one.token_ids for one in together]
        assert (found if order is each else found[::-1]) == alone


def test_the_size_of_chunks_does_not_change_the_answer(llm: LLM, folder: Path) -> None:
    with LLM(folder, prefill_step_size=13, cache_layout="slots", spec_prefill_model="self") as other:
        assert ask(other, SKIPPING).token_ids == ask(llm, SKIPPING).token_ids


def test_another_model_may_score(llm: LLM, folder: Path) -> None:
    with LLM(folder, spec_prefill_model=folder, spec_prefill_layers=2) as other:
        found = ask(other, SKIPPING)
    assert found.token_ids == ask(llm, SKIPPING).token_ids  # "self": half of three layers, which is two
    assert found.stats.num_skipped > 0


# -- cells -----------------------------------------------------------------------------------------------


def test_skipped_prompts_neither_enter_the_prefix_cache_nor_hit_it(folder: Path) -> None:
    with LLM(folder, spec_prefill_model="self") as llm:
        first = ask(llm, SKIPPING)
        exact = ask(llm, EXACT)
        assert exact.stats.num_cached == 0
        again = ask(llm, EXACT)
        assert (again.token_ids, again.stats.num_cached) == (exact.token_ids, len(PROMPT) - 1)
        for params in (SKIPPING, replace(SKIPPING, spec_prefill=SpecPrefill(1.0))):
            assert ask(llm, params).stats.num_cached == 0
        assert ask(llm, SKIPPING).token_ids == first.token_ids
    with LLM(folder, prefix_cache_bytes=0) as plain:
        assert ask(plain, EXACT).token_ids == exact.token_ids


def test_a_preempted_row_reads_the_same_tokens_again() -> None:
    request = Request("r", tuple(PROMPT), SKIPPING)
    row = Row(0, request, text=None, stop_ids=frozenset(), max_tokens=12)  # type: ignore[arg-type]
    assert row.awaits_scores
    row.keep(KEPT)
    assert not row.awaits_scores
    assert (row.num_prefill, row.num_skipped) == (len(KEPT), len(PROMPT) - len(KEPT))
    row.tokens += [1, 2, 3]
    row.num_cached = len(KEPT) + 2
    assert row.is_decoding
    row.drop_cache()
    assert row.num_prefill == len(KEPT) + 3
    assert list(row.positions(30, row.num_prefill)) == [*KEPT[30:], 300, 301, 302]


def test_a_row_that_is_preempted_while_it_is_scored_is_scored_from_the_start() -> None:
    row = Row(0, Request("r", tuple(PROMPT), SKIPPING), None, frozenset(), 12)  # type: ignore[arg-type]
    row.num_scored = 64
    row.drop_cache()
    assert (row.num_scored, row.awaits_scores) == (0, True)


# -- refusals --------------------------------------------------------------------------------------------


def test_it_is_off_by_default(folder: Path) -> None:
    with LLM(folder) as llm, pytest.raises(InvalidRequest, match="--spec-prefill-model"):
        ask(llm, SKIPPING)


def test_a_recurrent_model_is_refused_at_the_start_with_the_reason(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3_next")
    with pytest.raises(InvalidConfig, match="recurrent layers have one state"):
        LLM(tmp_path, spec_prefill_model="self")
    with LLM(tmp_path) as llm, pytest.raises(InvalidRequest, match="recurrent layers have one state"):
        ask(llm, SKIPPING, PROMPT[:100])


def test_log_probabilities_of_the_prompt_are_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="log-probabilities of the prompt"):
        ask(llm, replace(SKIPPING, prompt_logprobs=0))


@pytest.mark.parametrize("keep", [0, -0.1, 1.01, True, "0.3", float("nan")])
def test_a_share_out_of_range_is_refused(keep: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"spec_prefill\.keep"):
        SpecPrefill(keep)


def test_a_scoring_model_with_another_vocabulary_is_refused(folder: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    write_tokenizer(tmp_path, [*SPECIAL_TOKENS, "<|more|>"])
    with pytest.raises(InvalidConfig, match="its vocabulary is not that of"):
        LLM(folder, spec_prefill_model=tmp_path)


def test_layers_without_a_model_are_refused(folder: Path) -> None:
    with pytest.raises(InvalidConfig, match="--spec-prefill-model"):
        LLM(folder, spec_prefill_layers=1)


def test_a_prompt_that_cannot_be_scored_ends_its_request_only(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = ask(llm, SKIPPING).token_ids

    def fail(*_: object) -> None:
        raise RuntimeError("no scores")

    with monkeypatch.context() as broken:
        broken.setattr(PromptScorer, "read", fail)
        with pytest.raises(GenerationFailed, match=r"the prompt could not be scored$"):
            ask(llm, SKIPPING)
        assert ask(llm, EXACT).token_ids
    assert ask(llm, SKIPPING).token_ids == expected


def test_the_scores_choose_the_tokens(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, float]] = []

    def spy(scores: np.ndarray, keep: float) -> list[int]:
        seen.append((len(scores), keep))
        return kept_positions(scores, keep)

    monkeypatch.setattr(scheduler, "kept_positions", spy)
    ask(llm, SKIPPING)
    assert seen == [(len(PROMPT), 0.5)]
