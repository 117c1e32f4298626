"""Videos through temporal patches: mlx-vlm's own answers, alone and in company, however they draft."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from image_files import noise
from media_world import GREEDY, HOT, NUM_TOKENS, TEXTS, Prompt, World, answers, new_world, tokens
from outrider import LLM
from outrider.chat.conversation import ChatRequest, ImagePart, Message, Part, TextPart
from outrider.media.decoder import MediaDecoder
from outrider.media.frames import DecodedVideo, VideoHeader
from outrider.media.image_reader import ProcessedImage
from outrider.media.images import image_from_pixels
from outrider.media.limits import MediaLimits
from outrider.models.loader import load
from patience import case_only_in_soak
from tiny_vision import QWEN_TOKENS, reference_logits, reference_tokens, reference_video_inputs
from video_files import clip, encoded_video

FAMILIES = [
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_5",
    *map(case_only_in_soak, ("qwen2_vl", "qwen3_vl_moe", "qwen3_5_moe")),
]
SHOWN = "<|vision_start|><|video_pad|><|vision_end|>"
# At 2 frames a second: 8 frames of 40 (positions of whole seconds, as mlx-vlm has them), and 6 of 15.
LONG, SHORT = encoded_video(clip(40)), encoded_video(clip(15, 56, 72, 1), fps=5)
CASES: tuple[tuple[tuple[str, ...], tuple[bytes, ...]], ...] = (
    (("look: ", "what moves?"), (LONG,)),
    (("", " and ", "are they alike?"), (SHORT, LONG)),
)
LIMIT = 128
VIDEO_TOKEN_ID = QWEN_TOKENS["video_token_id"]


@pytest.fixture(scope="module", params=FAMILIES)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return new_world(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def llm(world: World) -> Iterator[LLM]:
    with LLM(world.folder, drafter="mtp", max_rows=8, prefill_step_size=24) as llm:
        yield llm


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two frame groups each."""
    monkeypatch.setattr("outrider.models.vision.video_processor.PATCHES_PER_PIECE", 96)


@pytest.fixture(scope="module")
def decoder() -> Iterator[MediaDecoder]:
    decoder = MediaDecoder(MediaLimits(), num_processes=1)
    yield decoder
    decoder.close()


def read(llm: LLM, decoder: MediaDecoder, data: bytes) -> ProcessedImage:
    videos = llm.renderer.video_reader
    assert videos is not None
    header = decoder.read_header(data, "")
    return videos.read(decoder.decode_video(data, "", header, videos.sample(header, LIMIT)))


def text(words: Sequence[str], shown: Sequence[str]) -> str:
    return (
        f"<|user|>{words[0]}"
        + "".join(map("".join, zip(shown, words[1:], strict=True)))
        + "<|end|><|assistant|>"
    )


def prompt(llm: LLM, inputs: dict[str, mx.array], media: Sequence[ProcessedImage]) -> Prompt:
    """The prompt is mlx-vlm's; only the pixels and their places are ours."""
    assert llm.engine.reader is not None
    ids = tuple(inputs["input_ids"][0].tolist())
    return Prompt(ids, llm.engine.reader.place(ids, media))


def case(world: World, llm: LLM, decoder: MediaDecoder, number: int) -> tuple[dict[str, mx.array], Prompt]:
    words, videos = CASES[number]
    inputs = reference_video_inputs(world.folder, world.family, text(words, [SHOWN] * len(videos)), videos)
    return inputs, prompt(llm, inputs, [read(llm, decoder, data) for data in videos])


# -- as mlx-vlm has it -----------------------------------------------------------------------------------


def test_logits_and_greedy_tokens_are_those_of_mlx_vlm(world: World, llm: LLM, decoder: MediaDecoder) -> None:
    for number in range(len(CASES)):
        inputs, asked = case(world, llm, decoder, number)
        assert_equal(world, inputs, llm, asked)


def assert_equal(world: World, inputs: dict[str, mx.array], llm: LLM, asked: Prompt) -> None:
    (found,) = answers(llm, (asked, GREEDY))
    assert list(found.token_ids) == reference_tokens(world.model, inputs, NUM_TOKENS)
    logits = np.array(reference_logits(world.model, inputs)[0, -1])
    logprobs = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    assert found.logprobs[0].top
    for token_id, logprob in found.logprobs[0].top:
        assert abs(float(logprobs[token_id]) - logprob) < 1e-4


def test_a_conversation_becomes_the_prompt_of_mlx_vlm(world: World, llm: LLM, decoder: MediaDecoder) -> None:
    """With the times of frames as text, in the families that have them so."""
    for number, (words, videos) in enumerate(CASES):
        inputs, _ = case(world, llm, decoder, number)
        parts: list[Part] = [TextPart(words[0])]
        for data, after in zip(videos, words[1:], strict=True):
            parts += [ImagePart((read(llm, decoder, data),)), TextPart(after)]
        found = llm.renderer.render(ChatRequest([Message("user", tuple(parts))], GREEDY))
        assert list(found.ids) == inputs["input_ids"][0].tolist()
        assert found.num_images == (8, 14)[number]  # frames


def test_embeddings_of_pieces_are_those_of_the_whole_video(
    world: World, llm: LLM, decoder: MediaDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece of one frame group each, against mlx-vlm's pass over all of them."""
    inputs, _ = case(world, llm, decoder, 0)
    monkeypatch.setattr("outrider.models.vision.video_processor.PATCHES_PER_PIECE", 1)
    pieces = read(llm, decoder, LONG).inputs
    assert len(pieces) == int(inputs["video_grid_thw"][0, 0]) == 4
    vision = load(world.folder).vision
    assert vision is not None
    found = mx.concatenate([vision.encoder.encode(one, size) for size, one in pieces])
    pixels = mx.concatenate([mx.array(one["pixel_values"]) for _, one in pieces])
    assert mx.array_equal(pixels, inputs["pixel_values_videos"])
    out = world.model.vision_tower(inputs["pixel_values_videos"], inputs["video_grid_thw"])
    expected, levels = out if isinstance(out, tuple) else (out, [])
    assert mx.abs(found - mx.concatenate([expected, *levels], axis=-1)).max() < 1e-5


def test_images_and_videos_share_a_prompt(world: World, llm: LLM, decoder: MediaDecoder) -> None:
    if world.family != "qwen3_vl":
        pytest.skip("mlx-vlm takes images or videos, not both, in this family")
    picture = "<|vision_start|><|image_pad|><|vision_end|>"
    pictures = (noise(40, 24), noise(16, 16, 1))
    rendered = text(("a ", " b ", " c ", " d"), (picture, SHOWN, picture))
    inputs = reference_video_inputs(world.folder, world.family, rendered, [SHORT], pictures)
    assert llm.engine.reader is not None
    first, last = (llm.engine.reader.read(image_from_pixels(pixels)) for pixels in pictures)
    assert_equal(world, inputs, llm, prompt(llm, inputs, [first, read(llm, decoder, SHORT), last]))


def test_positions_follow_the_seconds_of_a_video(tmp_path: Path, decoder: MediaDecoder) -> None:
    """Qwen2.5-VL: tokens_per_second positions for each second. mlx-vlm's positions count frame groups."""
    world = new_world(tmp_path, "qwen2_5_vl")
    config = json.loads((tmp_path / "config.json").read_text())
    config["vision_config"]["tokens_per_second"] = 3
    (tmp_path / "config.json").write_text(json.dumps(config))
    with LLM(tmp_path, prefill_step_size=24) as llm:
        inputs, asked = case(world, llm, decoder, 0)
        times, rows, columns = (np.array(inputs["video_grid_thw"])[0] // (1, 2, 2)).tolist()
        ids = inputs["input_ids"][0].tolist()
        before, after = ids.index(VIDEO_TOKEN_ID), len(ids) - 1 - ids[::-1].index(VIDEO_TOKEN_ID)
        positions = np.arange(len(ids))[None].repeat(3, 0)
        grid = np.indices((times, rows, columns)).reshape(3, -1) * [[3], [1], [1]]
        positions[:, before : after + 1] = grid + before
        positions[:, after + 1 :] += grid.max() + before - after
        delta = int(positions.max()) + 1 - len(ids)
        fixed = mx.array(positions[:, None]), mx.array([[delta]])
        object.__setattr__(world.model.language_model, "get_rope_index", lambda *_, **__: fixed)
        assert asked.media.positions is not None
        assert np.array_equal(asked.media.positions, positions)
        assert asked.media.delta == delta
        assert_equal(world, inputs, llm, asked)


# -- one batch -------------------------------------------------------------------------------------------


def test_rows_of_a_mixed_batch_give_what_they_give_alone(
    world: World, llm: LLM, decoder: MediaDecoder
) -> None:
    """Videos, an image and texts, greedy and sampled, drafting and plain."""
    assert llm.engine.reader is not None
    image = world.prompt(llm, ("see ", "?"), [noise(40, 24)])
    asked = [*(case(world, llm, decoder, i)[1] for i in range(2)), image, llm.tokenizer.encode(TEXTS[1])]
    plain = [replace(params, draft_depth=0) for params in (GREEDY, HOT)]
    alone = [tokens(llm, one, params) for params in plain for one in asked]
    both = [replace(params, draft_depth=3) for params in plain]
    together = answers(llm, *((one, params) for params in both for one in asked))
    assert [found.token_ids for found in together] == alone


def test_another_video_gives_another_answer_and_another_key(
    world: World, llm: LLM, decoder: MediaDecoder
) -> None:
    """The same prompt ids, so only the video tells the two from each other."""
    others = encoded_video(clip(40, seed=5))
    inputs, first = case(world, llm, decoder, 0)
    second = prompt(llm, inputs, [read(llm, decoder, others)])
    assert first.ids == second.ids
    assert tokens(llm, first) != tokens(llm, second)
    assert tokens(llm, first) == tokens(llm, first)  # from the prefix cache
    keys = first.media.distinct_ids(first.ids), second.media.distinct_ids(second.ids)
    assert keys[0] != keys[1]
    assert len({id for id in keys[0] if id < 0}) == len(first.media.pieces)


def test_the_rate_of_a_video_is_part_of_its_key(world: World, llm: LLM) -> None:
    """Its frames may be the same: their times are not."""
    videos = llm.renderer.video_reader
    assert videos is not None
    frames = clip(4, 16, 16)
    headers = [VideoHeader(4, fps, 16, 16) for fps in (2.0, 0.5)]
    found = [videos.read(DecodedVideo(header, (0, 1, 2, 3), frames)) for header in headers]
    has_times = world.family != "qwen2_vl"  # whose positions count frame groups
    assert (found[0].digest != found[1].digest) == has_times
