"""Images whose tokens attend to each other (Gemma 3 and 4): mlx-vlm's answers, however prompts are cut."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

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
from outrider import LLM
from outrider.cache.placement import Placement
from outrider.media.images import image_from_pixels
from outrider.models.loader import load
from outrider.prompt_media import MediaPiece, PromptMedia
from tiny_vision import SPANNED, reference_logits, reference_tokens, square_logits


@pytest.fixture(scope="module", params=SPANNED)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return new_world(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def gemma4(tmp_path_factory: pytest.TempPathFactory) -> World:
    return new_world(tmp_path_factory.mktemp("gemma4_alone"), "gemma4")


@pytest.fixture(scope="module")
def llm(world: World) -> Iterator[LLM]:
    """Chunks that are shorter than most images."""
    with LLM(world.folder, drafter="ngram", max_rows=8, prefill_step_size=8) as llm:
        yield llm


def test_logits_and_greedy_tokens_are_those_of_mlx_vlm(world: World, llm: LLM) -> None:
    for words, pictures in CASES:
        inputs = world.inputs(words, pictures)
        (found,) = answers(llm, (world.prompt(llm, words, pictures), GREEDY))
        assert list(found.token_ids) == reference_tokens(world.model, inputs, NUM_TOKENS)
        assert error_of_logprobs(world, inputs, found) < 1e-4


def test_a_causal_mask_would_give_other_logits(world: World) -> None:
    """So the comparison above sees the mask."""
    inputs = world.inputs(*CASES[0])
    if world.family == "gemma3":
        causal = square_logits(world.model, inputs, is_causal=True)
    else:
        kept = {name: value for name, value in inputs.items() if name != "mm_token_type_ids"}
        causal = reference_logits(world.model, kept)
    assert mx.abs(reference_logits(world.model, inputs)[0, -1] - causal[0, -1]).max() > 1e-2


def test_without_the_entry_in_the_config_images_are_causal(gemma4: World, tmp_path: Path) -> None:
    """As in Gemma 4's small models."""
    world = gemma4
    folder = tmp_path / "model"
    shutil.copytree(world.folder, folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["use_bidirectional_attention"] = None
    (folder / "config.json").write_text(json.dumps(config))
    inputs = world.inputs(*CASES[0])
    del inputs["mm_token_type_ids"]
    with LLM(folder, prefill_step_size=8) as llm:
        found = tokens(llm, world.prompt(llm, *CASES[0]))
    assert list(found) == reference_tokens(world.model, inputs, NUM_TOKENS)


def test_the_makers_names_load_and_the_audio_encoder_is_left_out(gemma4: World, tmp_path: Path) -> None:
    world, folder = gemma4, tmp_path / "model"
    shutil.copytree(world.folder, folder)
    stored = mx.load(str(world.folder / "model.safetensors"))
    assert isinstance(stored, dict)
    pairs = ((f"model.{name}", array) for name, array in stored.items())
    named = {name.replace("language_model.model", "language_model"): array for name, array in pairs}
    named |= {f"model.{part}.weight": mx.ones((4, 4)) for part in ("audio_tower.norm", "embed_audio.fc")}
    mx.save_safetensors(str(folder / "model.safetensors"), named, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"audio_config": {"hidden_size": 16}}
    (folder / "config.json").write_text(json.dumps(config))
    both = [load(one).vision for one in (world.folder, folder)]
    image = image_from_pixels(CASES[0][1][0])
    first, second = (one.encoder.encode(*reversed(one.reader.read(image).inputs[0])) for one in both if one)
    assert mx.array_equal(first, second)


def test_rows_of_a_mixed_batch_give_what_they_give_alone(world: World, llm: LLM) -> None:
    check_mixed_batch(world, llm)


@pytest.mark.parametrize("family", SPANNED)
def test_rows_of_a_quantised_model_give_what_they_give_alone(tmp_path: Path, family: str) -> None:
    """Its causal passes attend natively; a pass over an image does not, and has no other rows."""
    world = new_world(tmp_path, f"{family}-4bit")
    with LLM(world.folder, drafter="ngram", max_rows=8, prefill_step_size=8) as llm:
        check_mixed_batch(world, llm)


def check_mixed_batch(world: World, llm: LLM) -> None:
    media = [world.prompt(llm, *case) for case in CASES]
    texts = [llm.tokenizer.encode(text) for text in TEXTS]
    asked = [*media, *texts]
    alone = [tokens(llm, prompt, params) for params in (GREEDY, HOT) for prompt in asked]
    together = answers(llm, *((prompt, params) for params in (GREEDY, HOT) for prompt in asked))
    assert [found.token_ids for found in together] == alone


@pytest.mark.parametrize("chunk", [512, 5])
def test_chunks_and_cached_prefixes_change_nothing(world: World, llm: LLM, chunk: int) -> None:
    with LLM(world.folder, max_rows=4, prefill_step_size=chunk) as other:
        for case in CASES:
            prompt = world.prompt(llm, *case)
            assert tokens(other, prompt) == tokens(other, prompt) == tokens(llm, prompt)


def test_the_picture_changes_the_answer(world: World, llm: LLM) -> None:
    found = {tokens(llm, world.prompt(llm, ("look: ", "?"), (noise(40, 24, seed),))) for seed in range(3)}
    assert len(found) == 3


# -- the parts -------------------------------------------------------------------------------------------


def piece(*cells: int) -> MediaPiece:
    return MediaPiece(str(cells), {}, np.array(cells, np.int32))


def test_a_chunk_holds_a_whole_image_and_nothing_else() -> None:
    media = PromptMedia((piece(3, 4, 5), piece(6, 7)), is_bidirectional=True)
    ends, start = [], 0
    while start < 12:
        ends.append(start := media.chunk_end(start, 12))
    assert ends == [3, 6, 8, 12]
    assert [media.span_at(cell) for cell in (2, 3, 5, 6, 8)] == [None, (3, 6), (3, 6), (6, 8), None]
    causal = PromptMedia(media.pieces)
    assert causal.chunk_end(0, 12) == 12
    assert causal.span_at(3) is None


@pytest.mark.parametrize("window", [None, 2])
def test_tokens_of_an_image_attend_to_all_of_it(window: int | None) -> None:
    """An image in cells 3 to 6, of which cell 3 came from the prefix cache."""
    place = Placement([0], mx.array([4]), mx.array([3]), 3, 7, 16, span=(3, 7))
    mask = np.array(place.mask(window))[0, 0]  # [3, 16]
    first = {None: 0, 2: 3}[window]
    for row in mask:
        assert np.flatnonzero(row).tolist() == list(range(first, 7))
    assert place.window_of(place.mask(window)) is None
