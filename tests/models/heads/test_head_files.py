"""Where a head is found, when its norms get their 1, and what is said of one that does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from models.head_checkpoints import FAMILIES, QWENS, TinyHead, tiny_head, write
from outrider.models.heads import HeadError, LoadedHead, expected, load_head, locate, recognise
from outrider.models.trunk import Trunk

WRAPPERS = ["", "language_model.", "model.language_model.", "model."]
Tensors = dict[str, mx.array]


def same_parameters(one: LoadedHead, two: LoadedHead, atol: float = 1e-6) -> bool:
    pairs = zip(one.layers, two.layers, strict=True)
    return all(
        np.allclose(np.array(a), np.array(b), atol=atol)
        for x, y in pairs
        for (_, a), (_, b) in zip(tree_flatten(x.parameters()), tree_flatten(y.parameters()), strict=True)
    )


def expected_head(tiny: TinyHead, folder: Path) -> LoadedHead:
    """Loaded the plain way, whose logits are checked elsewhere."""
    return load_head(write(folder / "plain.safetensors", tiny.published(), {"format": "pt"}), tiny.trunk)


def folder_of(tiny: TinyHead, folder: Path, shards: list[Tensors]) -> Path:
    """A checkpoint folder of these files, each with its publisher's metadata."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(tiny.config))
    for number, tensors in enumerate(shards, 1):
        write(folder / f"model-{number:05}-of-{len(shards):05}.safetensors", tensors, {"format": "pt"})
    return folder


def halves(tensors: Tensors) -> list[Tensors]:
    names = sorted(tensors)
    return [{name: tensors[name] for name in part} for part in (names[::2], names[1::2])]


# -- where -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_head_inside_the_checkpoints_shards_is_found(tmp_path: Path, wrapper: str) -> None:
    tiny = tiny_head("qwen3_5")
    head = {wrapper + name: array for name, array in tiny.published().items()}
    trunk = {"model.language_model.layers.0.linear_attn.conv1d.weight": mx.ones((8, 1, 4))}
    found = locate(folder_of(tiny, tmp_path / "model", halves(head | trunk)))
    assert found is not None
    assert found.is_inside
    assert set(found.stored) == set(head)
    assert sum(len(names) for names in found.files.values()) == len(head)
    assert len(found.files) == 2
    assert found.dtypes == {"F32"}
    assert found.num_bytes == sum(array.nbytes for array in head.values())
    assert same_parameters(load_head(found, tiny.trunk), expected_head(tiny, tmp_path))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_is_told_from_the_trunk_around_it(tmp_path: Path, family: str) -> None:
    tiny = tiny_head(family)
    trunk = dict(tree_flatten(tiny.model.parameters()))
    found = locate(folder_of(tiny, tmp_path / "model", [trunk | tiny.published()]))
    assert found is not None
    assert set(found.stored) == set(tiny.published())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trunk_alone_has_no_head(tmp_path: Path, family: str) -> None:
    tiny = tiny_head(family)
    folder = folder_of(tiny, tmp_path / "model", [dict(tree_flatten(tiny.model.parameters()))])
    assert locate(folder) is None
    with pytest.raises(HeadError, match="contains no MTP head"):
        load_head(folder, tiny.trunk)


def test_a_file_beside_the_model_comes_first(tmp_path: Path) -> None:
    tiny = tiny_head("glm4_moe")
    folder = folder_of(tiny, tmp_path / "model", [tiny.published()])
    write(folder / "mtp" / "weights.safetensors", tiny.converted())
    found = locate(folder)
    assert found is not None
    assert not found.is_inside
    assert found.source == folder / "mtp" / "weights.safetensors"


def test_a_drafter_that_stands_alone_needs_no_prefix(tmp_path: Path) -> None:
    tiny = tiny_head("qwen3_5")
    alone = {name.removeprefix("mtp."): array for name, array in tiny.converted().items()}
    alone |= {"embed_tokens.weight": mx.ones((113, 64)), "lm_head.weight": mx.ones((113, 64))}
    head = load_head(write(tmp_path / "drafter.safetensors", alone, {"format": "mlx"}), tiny.trunk)
    assert same_parameters(head, expected_head(tiny, tmp_path))


def test_copies_of_the_trunks_embeddings_are_known_and_not_read(tmp_path: Path) -> None:
    tiny = tiny_head("glm4_moe")
    copies = {
        "model.layers.3.embed_tokens.weight": mx.ones((113, 64)),
        "model.layers.3.shared_head.head.weight": mx.ones((113, 64)),
    }
    file = write(tmp_path / "mtp.safetensors", tiny.published() | copies)
    assert same_parameters(load_head(file, tiny.trunk), expected_head(tiny, tmp_path))
    found = recognise([*tiny.published(), *copies], tiny.config)
    assert found is not None
    assert set(found.unused) == set(copies)


def test_a_nextn_file_may_number_its_layers_from_zero(tmp_path: Path) -> None:
    tiny = tiny_head("glm4_moe")
    zero = {name.replace("layers.3.", "layers.0."): array for name, array in tiny.published().items()}
    head = load_head(write(tmp_path / "mtp.safetensors", zero), tiny.trunk)
    assert same_parameters(head, expected_head(tiny, tmp_path))


@pytest.mark.parametrize(
    ("config", "number"),
    [
        ({"num_nextn_predict_layers": 1}, 1),
        ({"model_type": "qwen3_5", "text_config": {"mtp_num_hidden_layers": 2}}, 2),
        ({"model_type": "qwen3_next"}, 1),
        ({"model_type": "mimo_v2_flash"}, 3),
        ({"model_type": "deepseek_v3", "num_nextn_predict_layers": 0}, 0),
        ({"model_type": "llama"}, 0),
        ({}, 0),
    ],
)
def test_a_config_says_whether_the_original_has_a_head(config: dict[str, Any], number: int) -> None:
    assert expected(config) == number


# -- norms -----------------------------------------------------------------------------------------------


RAW_CONV, MLX_CONV = mx.ones((8, 1, 4)), mx.ones((8, 4, 1))


@pytest.mark.parametrize("family", QWENS)
@pytest.mark.parametrize("form", ["published", "converted"])
def test_norms_inside_a_checkpoint_are_told_by_its_convolutions(
    tmp_path: Path, family: str, form: str
) -> None:
    """Whatever the metadata says: some converters write the publisher's."""
    tiny = tiny_head(family)
    is_raw = form == "published"
    tensors = tiny.published() if is_raw else tiny.converted()
    tensors["model.layers.0.linear_attn.conv1d.weight"] = RAW_CONV if is_raw else MLX_CONV
    head = load_head(folder_of(tiny, tmp_path / "model", [tensors]), tiny.trunk)
    assert same_parameters(head, expected_head(tiny, tmp_path))


def test_a_head_that_a_converter_only_copied_is_told_by_its_experts(tmp_path: Path) -> None:
    tiny = tiny_head("qwen3_5_moe")
    tensors = tiny.published() | {"model.layers.0.linear_attn.conv1d.weight": MLX_CONV}
    head = load_head(folder_of(tiny, tmp_path / "model", [tensors]), tiny.trunk)
    assert same_parameters(head, expected_head(tiny, tmp_path))


@pytest.mark.parametrize("form", ["published", "converted"])
def test_norms_in_a_file_of_their_own_are_told_by_its_metadata(tmp_path: Path, form: str) -> None:
    """Not by the trunk's files around it, which may be the other kind."""
    tiny = tiny_head("qwen3_5")
    is_raw = form == "published"
    conv = MLX_CONV if is_raw else RAW_CONV
    folder = folder_of(tiny, tmp_path / "model", [{"model.layers.0.linear_attn.conv1d.weight": conv}])
    tensors = tiny.published() if is_raw else tiny.converted()
    write(folder / "mtp.safetensors", tensors, {"format": "pt" if is_raw else "mlx"})
    assert same_parameters(load_head(folder, tiny.trunk), expected_head(tiny, tmp_path))


def test_norms_that_nothing_tells_of_are_not_guessed_at(tmp_path: Path) -> None:
    tiny = tiny_head("qwen3_5")
    file = write(tmp_path / "mtp.safetensors", tiny.published())
    with pytest.raises(HeadError, match="zero-centred") as caught:
        load_head(file, tiny.trunk)
    assert "outrider mtp extract" in str(caught.value)


# -- quantised -------------------------------------------------------------------------------------------


def quantised(tensors: Tensors, group_size: int, bits: int) -> tuple[Tensors, Tensors]:
    """A converter's output, and what it stands for."""
    stored, meant = dict(tensors), dict(tensors)
    for name, array in tensors.items():
        if array.ndim < 2 or array.shape[-1] % group_size or "gate.weight" in name:
            continue
        path = name.removesuffix(".weight")
        weight, scales, biases = mx.quantize(array, group_size, bits)
        stored |= {name: weight, f"{path}.scales": scales, f"{path}.biases": biases}
        meant[name] = mx.dequantize(weight, scales, biases, group_size, bits)
    return stored, meant


@pytest.mark.parametrize(("family", "bits"), [("qwen3_5", 4), ("qwen3_5_moe", 8), ("glm4_moe", 4)])
def test_a_quantised_head_is_dequantised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, bits: int
) -> None:
    monkeypatch.setattr("outrider.models.dtypes.keeps_quantized", lambda dtype: False)
    tiny = tiny_head(family)
    stored, meant = quantised(tiny.converted(), 32, bits)
    assert len(stored) > len(meant)
    head = load_head(write(tmp_path / "a.safetensors", stored), tiny.trunk)
    plain = load_head(write(tmp_path / "b.safetensors", meant, {"format": "mlx"}), tiny.trunk)
    assert same_parameters(head, plain)
    assert {array.dtype for _, array in tree_flatten(head.layers[0].parameters())} == {mx.float32}


@pytest.mark.parametrize("family", ["qwen3_5", "glm4_moe"])
def test_a_quantised_trunk_takes_a_16_bit_head(tmp_path: Path, family: str) -> None:
    tiny = tiny_head(family)
    tiny.model.set_dtype(mx.bfloat16)
    nn.quantize(tiny.model, group_size=32, bits=4)
    trunk = Trunk(tiny.model, max_context=64)
    tensors = {name: array.astype(mx.bfloat16) for name, array in tiny.published().items()}
    head = load_head(write(tmp_path / "mtp.safetensors", tensors, {"format": "pt"}), trunk)
    parameters: Tensors = dict(tree_flatten(head.layers[0].parameters()))
    floats = {array.dtype for name, array in parameters.items() if "e_score" not in name}
    assert floats == {mx.bfloat16}
    fc = next(array for name, array in tensors.items() if name.endswith(("eh_proj.weight", "fc.weight")))
    np.testing.assert_array_equal(
        np.array(parameters["fc.weight"].astype(mx.float32)), np.array(fc.astype(mx.float32))
    )


# -- what does not fit -----------------------------------------------------------------------------------


MISSING = [
    ("qwen3_5", "mtp.fc.weight"),
    ("qwen3_5", "mtp.pre_fc_norm_hidden.weight"),
    ("qwen3_5", "mtp.layers.0.self_attn.q_norm.weight"),
    ("qwen3_next", "mtp.layers.0.mlp.experts.2.up_proj.weight"),
    ("deepseek_v3", "model.layers.3.eh_proj.weight"),
    ("deepseek_v3", "model.layers.3.shared_head.norm.weight"),
    ("glm4_moe", "model.layers.3.mlp.experts.1.down_proj.weight"),
    ("mimo", "model.mtp_layers.0.input_proj.weight"),
    ("mimo_v2_flash", "model.mtp.layers.0.pre_mlp_layernorm.weight"),
    ("ernie4_5", "model.mtp_block.0.mlp.up_proj.weight"),
    ("longcat_flash", "model.mtp.layers.0.enorm.m.weight"),
    ("nemotron_h", "mtp.layers.0.hnorm.weight"),
]


@pytest.mark.parametrize(("family", "name"), MISSING)
def test_half_a_head_is_named_by_what_it_lacks(tmp_path: Path, family: str, name: str) -> None:
    tiny = tiny_head(family)
    tensors = tiny.published()
    del tensors[name]
    file = write(tmp_path / "mtp.safetensors", tensors, {"format": "pt"})
    with pytest.raises(HeadError, match="only part of a head") as caught:
        load_head(file, tiny.trunk, config=tiny.config)
    assert name in str(caught.value)
    assert "outrider mtp extract" in str(caught.value)


def test_latent_attention_without_its_up_projection_is_half_a_head(tmp_path: Path) -> None:
    tiny = tiny_head("deepseek_v3")
    tensors = tiny.published()
    del tensors["model.layers.3.self_attn.kv_b_proj.weight"]
    with pytest.raises(HeadError, match=r"only part of a head: model\.layers\.3\.self_attn\.embed_q\.weight"):
        load_head(write(tmp_path / "mtp.safetensors", tensors), tiny.trunk)


def test_a_depth_in_the_middle_may_not_be_missing(tmp_path: Path) -> None:
    tiny = tiny_head("mimo", num_depths=3)
    tensors = {name: array for name, array in tiny.published().items() if ".1." not in name}
    with pytest.raises(HeadError, match=r"only part of a head: model\.mtp_layers\.1\."):
        load_head(write(tmp_path / "mtp.safetensors", tensors), tiny.trunk)


@pytest.mark.parametrize("family", ["qwen3_5", "glm4_moe", "mimo", "ernie4_5"])
def test_a_head_of_another_width_is_refused(tmp_path: Path, family: str) -> None:
    tiny = tiny_head(family)
    narrow = {
        name: mx.ones([{64: 32, 128: 64}.get(size, size) for size in array.shape])
        for name, array in tiny.published().items()
    }
    file = write(tmp_path / "mtp.safetensors", narrow, {"format": "pt"})
    with pytest.raises(HeadError, match=r"for another model.*hidden size is 64") as caught:
        load_head(file, tiny.trunk)
    assert "norm" in str(caught.value)


def test_a_head_that_follows_more_layers_is_for_another_model(tmp_path: Path) -> None:
    tiny = tiny_head("glm4_moe")
    deep = {name.replace("layers.3.", "layers.46."): array for name, array in tiny.published().items()}
    with pytest.raises(HeadError, match=r"for another model.*layer 46.*3 layers"):
        load_head(write(tmp_path / "mtp.safetensors", deep), tiny.trunk, config=tiny.config)


def test_a_wrong_shape_is_named(tmp_path: Path) -> None:
    tiny = tiny_head("glm4_moe")
    name = "model.layers.3.self_attn.k_proj.weight"
    file = write(tmp_path / "mtp.safetensors", tiny.published() | {name: mx.ones((64, 64))})
    with pytest.raises(HeadError, match="for another model") as caught:
        load_head(file, tiny.trunk)
    assert f"{name} is [64, 64], this model needs [32, 64]" in str(caught.value)


@pytest.mark.parametrize("family", ["glm4_moe", "mimo"])
def test_a_block_of_another_kind_is_refused(tmp_path: Path, family: str) -> None:
    """Experts for a model without them, latent attention for one without."""
    other = {"glm4_moe": "mimo", "mimo": "deepseek_v3"}[family]
    tensors = tiny_head(other).published()
    with pytest.raises(HeadError, match=r"another model|only part|does not have"):
        load_head(write(tmp_path / "mtp.safetensors", tensors), tiny_head(family).trunk)
