"""Media rows in the shared batch: mlx-vlm's own answers, alone and in company, however they draft."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from image_files import noise
from media_world import (
    CASES,
    GREEDY,
    HOT,
    NUM_TOKENS,
    TEXTS,
    World,
    answers,
    error_of_logprobs,
    new_world,
    tokens,
)
from outrider import LLM, InvalidRequest, SamplingParams
from outrider.models.loader import load
from outrider.prompt_media import MediaPiece, PromptMedia
from patience import IN_SOAK, in_test_or_soak
from tiny_models import write_checkpoint
from tiny_vision import FAMILIES, SPANNED, TILED, reference_tokens


@pytest.fixture(scope="module", params=[family for family in FAMILIES if family not in SPANNED])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return new_world(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def llm(world: World) -> Iterator[LLM]:
    with LLM(world.folder, drafter="mtp", max_rows=8, prefill_step_size=24) as llm:
        yield llm


# -- as mlx-vlm has it -----------------------------------------------------------------------------------


def test_logits_and_greedy_tokens_are_those_of_mlx_vlm(world: World, llm: LLM) -> None:
    for words, pictures in CASES:
        inputs = world.inputs(words, pictures)
        (found,) = answers(llm, (world.prompt(llm, words, pictures), GREEDY))
        assert list(found.token_ids) == reference_tokens(world.model, inputs, NUM_TOKENS)
        assert error_of_logprobs(world, inputs, found) < 1e-4


def test_rows_of_a_mixed_batch_give_what_they_give_alone(world: World, llm: LLM) -> None:
    """Three media rows with their own pictures and positions, three text rows, uneven lengths, one batch."""
    media = [world.prompt(llm, *case) for case in CASES]
    texts = [llm.tokenizer.encode(text) for text in TEXTS]
    inputs = [world.inputs(*case) for case in CASES]
    expected = [reference_tokens(world.model, one, NUM_TOKENS) for one in inputs]
    alone = [tokens(llm, ids) for ids in texts]
    mixed = [item for pair in zip(media, texts, strict=True) for item in pair]
    found = answers(llm, *((item, GREEDY) for item in mixed))
    assert [list(one.token_ids) for one in found[::2]] == expected
    assert [one.token_ids for one in found[1::2]] == alone
    for one, its_inputs in zip(found[::2], inputs, strict=True):
        assert error_of_logprobs(world, its_inputs, one) < 1e-4


def test_positions_and_deltas_differ_from_row_to_row(world: World, llm: LLM) -> None:
    media = [world.prompt(llm, *case).media for case in CASES]
    if world.family in TILED:
        assert all(one.positions is None and one.delta == 0 for one in media)
    else:
        assert len({one.delta for one in media}) == 3
        assert all(one.delta < 0 for one in media)


# -- the picture matters ---------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 3])
def test_another_picture_gives_another_answer_alone_and_in_company(
    world: World, llm: LLM, depth: int
) -> None:
    params = replace(GREEDY, draft_depth=depth)
    first, second = (world.prompt(llm, ("is ", " it?"), [noise(40, 24, seed)]) for seed in (1, 2))
    assert first.ids == second.ids
    alone = [answers(llm, (prompt, params))[0] for prompt in (first, second)]
    company = answers(llm, (first, params), (llm.tokenizer.encode("hm"), params), (second, params))
    for one, other in ((alone[0], company[0]), (alone[1], company[2])):
        assert one.token_ids == other.token_ids
    assert alone[0].logprobs[0].logprob != alone[1].logprobs[0].logprob
    assert alone[0].token_ids != alone[1].token_ids
    assert first.media.distinct_ids(first.ids) != second.media.distinct_ids(second.ids)


# -- drafter invariance ----------------------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.parametrize("params", [GREEDY, HOT], ids=["greedy", "sampled"])
def test_drafts_change_nothing_whoever_makes_them(world: World, llm: LLM, params: SamplingParams) -> None:
    for case in CASES[: in_test_or_soak(1, 2)]:
        prompt = world.prompt(llm, *case)
        plain = tokens(llm, prompt, replace(params, draft_depth=0))
        for depth in (1, 4, 8) if IN_SOAK else (1, 8):
            assert tokens(llm, prompt, replace(params, draft_depth=depth)) == plain
        wrong_in_the_middle = (*plain[:5], (plain[5] + 1) % 100, *plain[6:])
        (found,) = answers(llm, (prompt, replace(params, prediction_ids=wrong_in_the_middle, draft_depth=4)))
        assert found.token_ids == plain
        assert found.stats is not None
        assert 0 < sum(found.stats.accepted) < sum(found.stats.drafted)


# -- one set of weights ----------------------------------------------------------------------------------


def test_the_weights_are_held_once(world: World) -> None:
    mx.clear_cache()
    before = mx.get_active_memory()
    loaded = load(world.folder)
    assert loaded.vision is not None
    held = mx.get_active_memory() - before
    in_file = sum(array.nbytes for array in mx.load(str(world.folder / "model.safetensors")).values())
    assert held < 1.2 * in_file
    modules = (loaded.vision.encoder.model, loaded.trunk.model)
    arrays = [array for one in modules for _, array in tree_flatten(one.parameters())]
    assert sum(array.nbytes for array in arrays) == in_file
    assert len({id(array) for array in arrays}) == len(arrays)
    assert not any("language" in name for name, _ in tree_flatten(loaded.vision.encoder.model.parameters()))


def test_a_text_engine_refuses_a_media_prompt(tmp_path: Path) -> None:
    media = PromptMedia((MediaPiece("a", {}, np.array([1], np.int32)),))
    write_checkpoint(tmp_path, "llama")
    with LLM(tmp_path) as blind, pytest.raises(InvalidRequest, match="text only"):
        blind.engine.validate([1, 2, 3], GREEDY, media=media)
