"""Vision checkpoints: names, quantised encoders, what is missing; readers against mlx-vlm's processors."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from image_files import noise
from outrider import LLM
from outrider.cache.placement import GridPositions
from outrider.media.images import image_from_pixels
from outrider.media.limits import InvalidMedia
from outrider.models import loader
from outrider.models.loader import load
from outrider.models.vision import encoder
from outrider.models.vision.families import REFUSED, SUPPORTED
from outrider.models.vision.mrope import MRope, MRopeSections
from ragged_rows import error, solo_logits
from tiny_vision import FAMILIES, SHOWN, TILED, reference_inputs, vision_config, write_vision_checkpoint


def rewrite(folder: Path, rename: Any) -> None:
    """The same weights under other names."""
    file = folder / "model.safetensors"
    weights = {rename(name): mx.array(array) for name, array in mx.load(str(file)).items()}  # type: ignore[union-attr]
    mx.eval(weights)
    mx.save_safetensors(str(file), weights, {"format": "pt"})


def hugging_face_name(name: str) -> str:
    if name.startswith("language_model.lm_head"):
        return name.removeprefix("language_model.")
    return "model." + re.sub(r"^language_model\.", "text_model.", name)


@pytest.mark.parametrize("family", TILED)
def test_hugging_faces_names_load_like_mlx_vlms(tmp_path: Path, family: str) -> None:
    write_vision_checkpoint(tmp_path, family)
    before = load(tmp_path)
    rewrite(tmp_path, hugging_face_name)
    after = load(tmp_path)
    assert (
        error(solo_logits(before.trunk.model, [5, 50, 60]), solo_logits(after.trunk.model, [5, 50, 60])) == 0
    )
    assert before.vision is not None
    assert after.vision is not None
    read = before.vision.reader.read(image_from_pixels(noise(20, 30)))
    for size, inputs in read.inputs:
        same = [one.vision.encoder.encode(inputs, size) for one in (before, after) if one.vision is not None]
        assert mx.array_equal(*same)


def test_tied_embeddings_are_found_by_the_missing_projection(tmp_path: Path) -> None:
    write_vision_checkpoint(tmp_path, "smolvlm")
    file = tmp_path / "model.safetensors"
    weights = {k: mx.array(v) for k, v in mx.load(str(file)).items() if "lm_head" not in k}  # type: ignore[union-attr]
    mx.eval(weights)
    mx.save_safetensors(str(file), weights)
    trunk = load(tmp_path).trunk
    assert trunk.vocab_size == 144
    assert not hasattr(trunk.model, "lm_head")


@pytest.mark.parametrize("family", ["smolvlm", "qwen2_5_vl"])
def test_a_quantised_checkpoint_loads_vision_encoder_and_trunk(tmp_path: Path, family: str) -> None:
    model = write_vision_checkpoint(tmp_path, family)
    exact = load(tmp_path)
    assert exact.vision is not None
    read = exact.vision.reader.read(image_from_pixels(noise(20, 30)))
    size, inputs = read.inputs[0]
    expected = exact.vision.encoder.encode(inputs, size)
    nn.quantize(
        model, 32, 8, class_predicate=lambda _, m: hasattr(m, "to_quantized") and m.weight.shape[-1] % 32 == 0
    )
    mx.save_safetensors(str(tmp_path / "model.safetensors"), dict(tree_flatten(model.parameters())))
    config = vision_config(family) | {"quantization": {"group_size": 32, "bits": 8}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load(tmp_path)
    assert loaded.vision is not None
    found = loaded.vision.encoder.encode(inputs, size)
    assert 0 < float(mx.abs(found - expected).max()) < 0.2


def write_quantised(folder: Path, **changes: Any) -> dict[str, mx.array]:
    """A checkpoint in 8 bits with such changes of its quantization config. Returns its tensors."""
    model = write_vision_checkpoint(folder, "qwen2_5_vl")
    nn.quantize(
        model, 32, 8, class_predicate=lambda _, m: hasattr(m, "to_quantized") and m.weight.shape[-1] % 32 == 0
    )
    tensors: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    config = vision_config("qwen2_5_vl") | {"quantization": {"group_size": 32, "bits": 8} | changes}
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def test_a_damaged_tensor_of_a_quantised_vision_encoder_is_named(tmp_path: Path) -> None:
    tensors = write_quantised(tmp_path)
    name = "vision_tower.blocks.0.attn.qkv.scales"
    tensors[name] = tensors[name].astype(mx.int32)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), tensors)
    with pytest.raises(encoder.ModelUnavailable, match=rf"vision encoder in {tmp_path} .*{name} is int32"):
        load(tmp_path)


def test_a_group_size_that_a_vision_encoder_cannot_have_is_named(tmp_path: Path) -> None:
    tensors = write_quantised(tmp_path, group_size=128)
    reason = r"vision_tower\.\S+ has rows of 32, which groups of 128 do not divide: check group_size"
    with pytest.raises(encoder.ModelUnavailable, match=reason):
        load(tmp_path)
    own = {"group_size": 32, "bits": 8}
    layers = [name.removesuffix(".scales") for name in tensors if name.endswith(".scales")]
    write_quantised(tmp_path, group_size=128, **dict.fromkeys(layers, own))
    assert load(tmp_path).vision is not None, "layers with an entry of their own do not use it"


@pytest.mark.parametrize("family", FAMILIES)
def test_readers_say_what_mlx_vlms_processors_say(tmp_path: Path, family: str) -> None:
    write_vision_checkpoint(tmp_path, family)
    loaded = load(tmp_path)
    assert loaded.vision is not None
    reader = loaded.vision.reader
    start = "<|vision_start|>" if SHOWN[family].startswith("<|vision_start|>") else ""
    for sizes in (((40, 24),), ((16, 16), (100, 20)), ((9, 31), (32, 32), (16, 16))):
        pictures = [noise(*size, seed) for seed, size in enumerate(sizes)]
        read = [reader.read(image_from_pixels(pixels)) for pixels in pictures]
        words = [f"word {i} {start}" for i in range(len(pictures))]
        asked = "".join(word + reader.placeholder for word in words) + " end"
        inputs = reference_inputs(tmp_path, family, asked, pictures)
        mine = "".join(word + one.text for word, one in zip(words, read, strict=True)) + " end"
        ids = loaded.tokenizer.encode(mine, add_special_tokens=False)
        assert ids == inputs["input_ids"][0].tolist()
        media = reader.place(ids, read)
        assert len({piece.key for piece in media.pieces}) == len(media.pieces)
        cells = np.concatenate([piece.cells for piece in media.pieces])
        assert (np.array(ids)[cells] == SUPPORTED_TOKEN).all()
        assert len(cells) == ids.count(SUPPORTED_TOKEN)
        with pytest.raises(InvalidMedia, match="tokens"):
            reader.place(ids[:-8] + [SUPPORTED_TOKEN] * 8, read)


SUPPORTED_TOKEN = vision_config("smolvlm")["image_token_id"]


def test_a_picture_of_an_extreme_shape_is_read_or_refused(tmp_path: Path) -> None:
    for family in ("smolvlm", "qwen2_5_vl"):
        write_vision_checkpoint(tmp_path / family, family)
        loaded = load(tmp_path / family)
        assert loaded.vision is not None
        for width, height in ((1, 1), (1, 500), (500, 1), (3, 3)):
            with contextlib.suppress(InvalidMedia):
                read = loaded.vision.reader.read(image_from_pixels(noise(width, height)))
                for size, inputs in read.inputs:
                    assert mx.isfinite(loaded.vision.encoder.encode(inputs, size)).all()


# -- what does not see -----------------------------------------------------------------------------------


def test_without_the_extra_a_vision_model_reads_text_and_says_why(tmp_path: Path, monkeypatch: Any) -> None:
    write_vision_checkpoint(tmp_path, "smolvlm")
    monkeypatch.setattr(loader, "has_extra", lambda: False)
    with LLM(tmp_path) as llm:
        assert not llm.engine.facts.reads_images
        assert "outrider[vision]" in str(llm.engine.facts.no_images_reason)
        assert llm.engine.reader is None
        assert llm.generate("hello")[0].text is not None


def test_a_checkpoint_without_its_vision_encoder_is_a_text_model(tmp_path: Path) -> None:
    write_vision_checkpoint(tmp_path, "qwen2_5_vl")
    file = tmp_path / "model.safetensors"
    weights = {k: mx.array(v) for k, v in mx.load(str(file)).items() if "vision" not in k}  # type: ignore[union-attr]
    mx.eval(weights)
    mx.save_safetensors(str(file), weights)
    loaded = load(tmp_path)
    assert loaded.vision is None
    assert "no vision encoder" in str(loaded.no_images_reason)


def test_families_that_are_not_served_have_a_reason() -> None:
    from outrider.models.vision.families import vision_family, why_text_only

    assert not SUPPORTED.keys() & REFUSED.keys()
    for name, reason in REFUSED.items():
        config = {"model_type": name, "vision_config": {"depth": 1}}
        assert vision_family(config) is None
        assert reason in str(why_text_only(config))
    assert "not been checked" in str(why_text_only({"model_type": "pixtral", "vision_config": {"a": 1}}))
    assert why_text_only({"model_type": "llama"}) is None
    assert why_text_only({"model_type": "smolvlm", "vision_config": {"a": 1}}) is None


def test_audio_is_not_read_for_a_reason() -> None:
    from outrider.models.vision.families import why_no_audio

    assert why_no_audio({"model_type": "llama"}) == "llama has no audio encoder"
    assert "encoder of gemma4 is left out" in why_no_audio({"model_type": "gemma4", "audio_config": {"a": 1}})


def test_every_served_family_has_a_tiny_checkpoint() -> None:
    assert set(SUPPORTED) == set(FAMILIES)


def test_a_damaged_vision_encoder_names_the_folder(tmp_path: Path) -> None:
    write_vision_checkpoint(tmp_path, "smolvlm")
    rewrite(tmp_path, lambda name: name.replace("vision_model.encoder", "vision_model.decoder"))
    with pytest.raises(encoder.ModelUnavailable, match="vision encoder"):
        load(tmp_path)


# -- mrope -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sections", "count"), [([16, 24, 24], 64), ([24, 20, 20], 64), ([11, 11, 10], 32)])
def test_frequencies_use_the_axes_that_mlx_vlm_says(sections: list[int], count: int) -> None:
    from mlx_vlm.models.rope_utils import mrope_position_selector

    for layout in ("chunked", "interleaved"):
        expected = mrope_position_selector(layout, sections, count).tolist()
        assert MRopeSections(tuple(sections), layout).axes(count) == expected  # type: ignore[arg-type]


def test_equal_positions_give_what_plain_rope_gives_to_the_bit() -> None:
    """So a row gives the same whether its prompt was prefilled with a grid or with plain offsets."""
    rope = MRope(nn.RoPE(16, base=10000.0), MRopeSections((4, 2, 2), "interleaved"))
    x = mx.random.normal((3, 4, 7, 24), key=mx.random.key(1))
    starts = mx.array([0, 5, 1000])
    grid = mx.broadcast_to((starts[:, None] + mx.arange(7))[None], (3, 3, 7))
    assert mx.array_equal(rope(x, offset=starts), rope(x, offset=GridPositions(grid)))
