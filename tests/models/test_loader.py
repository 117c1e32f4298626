"""Checkpoint folders: what is loaded equals what was saved; what cannot be loaded names the file at fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_lm.models.switch_layers import SwitchLinear

from outrider.cpu.extension import extension
from outrider.cpu.quantized import CpuQuantizedMultiLinear, is_kept, quantized_layers
from outrider.models.dtypes import dequantize
from outrider.models.families import UnsupportedModel
from outrider.models.loader import (
    CONTEXT_KEYS,
    DEFAULT_CONTEXT,
    LoadedModel,
    ModelLoadError,
    find_folder,
    load,
)
from ragged_rows import error, solo_logits
from tiny_models import (
    END_ID,
    VOCAB_SIZE,
    quantized_tiny_model,
    save_checkpoint,
    tiny_config,
    tiny_model,
    write_checkpoint,
)

TEXT = [5, 9, 33, 70, 2, 111, 64]
QUANTIZED_TOLERANCE = 0.0015  # of layers that round tokens to 15 bits; largest here: 0.00035


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound llama checkpoint, to be damaged."""
    write_checkpoint(tmp_path / "model", "llama")
    return tmp_path / "model"


def _dtypes(loaded: LoadedModel) -> set[mx.Dtype]:
    return {array.dtype for _, array in tree_flatten(loaded.trunk.model.parameters())}


def _damaged(file: Path) -> str:
    """Why a model cannot be loaded; checks that the message names `file`."""
    with pytest.raises(ModelLoadError) as caught:
        load(file if file.is_dir() else file.parent)
    assert str(file) in str(caught.value)
    return str(caught.value)


def _rewrite_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "deepseek_v3"])
def test_a_checkpoint_is_loaded_as_it_was_saved(tmp_path: Path, family: str) -> None:
    saved = write_checkpoint(tmp_path / family, family)
    loaded = load(tmp_path / family)
    assert (loaded.family, loaded.path) == (family, tmp_path / family)
    assert loaded.eos_ids == {END_ID}
    assert loaded.trunk.vocab_size == VOCAB_SIZE
    assert loaded.trunk.max_context == 256
    assert loaded.config["model_type"] == family
    assert error(solo_logits(loaded.trunk.model, TEXT), solo_logits(saved, TEXT)) == 0


def test_a_remapped_model_type_is_loaded_as_its_family(folder: Path) -> None:
    _rewrite_config(folder, model_type="mistral")
    assert load(folder).family == "llama"


def test_the_tiny_tokenizer_can_be_used(folder: Path) -> None:
    tokenizer = load(str(folder)).tokenizer
    text = "Hi there, {braces}!\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    assert tokenizer.decode(prompt) == "<|user|>Hi<|end|><|assistant|>"


def test_generation_config_names_the_end_tokens(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 3]}))
    assert load(folder).eos_ids == {0, 3}


@pytest.mark.parametrize(
    ("family", "named", "max_context"),
    [
        ("llama", {"max_position_embeddings": 100}, 100),
        ("gpt2", {"n_positions": 256}, 256),  # learned positions: there is nothing past the last one
        ("internlm2", {}, DEFAULT_CONTEXT),
    ],
)
def test_the_context_is_the_one_that_the_config_names(
    tmp_path: Path, family: str, named: dict[str, int], max_context: int
) -> None:
    config = {key: value for key, value in tiny_config(family).items() if key not in CONTEXT_KEYS}
    save_checkpoint(tmp_path, tiny_model(family), config | named)
    assert load(tmp_path).trunk.max_context == max_context


@pytest.mark.parametrize(
    ("family", "mode", "bits", "group_size"),
    [
        ("llama", "affine", 4, 32),
        ("qwen3", "affine", 8, 64),
        ("qwen3_moe", "affine", 4, 32),
        ("llama", "mxfp4", 4, 32),
        ("qwen3", "nvfp4", 4, 16),
    ],
)
def test_with_dtype_float32_a_quantised_model_is_dequantised_on_the_cpu_with_the_same_logits(
    tmp_path: Path, family: str, mode: str, bits: int, group_size: int
) -> None:
    exact = solo_logits(tiny_model(family), TEXT)
    quantised = _save_quantised(tmp_path, family, group_size, bits, mode)
    loaded = load(tmp_path, "float32")
    want = solo_logits(quantised, TEXT)
    assert error(exact, want) > 1e-3  # quantising did something
    assert error(solo_logits(loaded.trunk.model, TEXT), want) <= 1e-5
    assert _dtypes(loaded) == {mx.float32}
    assert not any(hasattr(module, "bits") for _, module in loaded.trunk.model.named_modules())


@pytest.mark.skipif(extension() is None, reason="needs the native extension")
@pytest.mark.parametrize(
    ("family", "mode", "bits", "group_size"),
    [
        ("llama", "affine", 4, 32),
        ("qwen3", "affine", 8, 64),
        ("qwen3", "affine", 5, 32),
        ("llama", "affine", 6, 32),
        ("qwen3_moe", "affine", 4, 32),
        ("qwen3_moe", "mxfp4", 4, 32),
        ("llama", "mxfp8", 8, 32),
        ("qwen3", "nvfp4", 4, 16),
    ],
)
def test_a_quantised_model_stays_quantised_on_the_cpu(
    tmp_path: Path, family: str, mode: str, bits: int, group_size: int
) -> None:
    quantised = _save_quantised(tmp_path, family, group_size, bits, mode)
    loaded = load(tmp_path)
    layers = dict(loaded.trunk.model.named_modules())
    for name, before in quantised.named_modules():
        if hasattr(before, "bits"):
            assert is_kept(layers[name]), name
            for part in ("weight", "scales", "biases") if mode == "affine" else ("weight", "scales"):
                assert mx.array_equal(layers[name][part], before[part])
                assert layers[name][part].dtype == before[part].dtype
    assert loaded.trunk.dtype == mx.float32
    assert error(solo_logits(loaded.trunk.model, TEXT), solo_logits(quantised, TEXT)) < QUANTIZED_TOLERANCE


@pytest.mark.parametrize(("mode", "bits", "group_size"), [("nvfp4", 4, 16), ("mxfp8", 8, 32)])
def test_a_model_with_quantised_activations_runs_on_the_cpu(
    tmp_path: Path, mode: str, bits: int, group_size: int
) -> None:
    """MLX rounds tokens of such models to the weights' format, on GPUs only. Here they are rounded less."""
    model = tiny_model("llama")
    settings = {"group_size": group_size, "bits": bits, "mode": mode}
    nn.quantize(model, **settings, class_predicate=lambda _, layer: type(layer) is nn.Linear)
    config = tiny_config("llama") | {"quantization": settings, "quantize_activations": True}
    save_checkpoint(tmp_path, model, config)
    want = solo_logits(model, TEXT)
    assert error(solo_logits(load(tmp_path, "float32").trunk.model, TEXT), want) <= 1e-5
    loaded = load(tmp_path)
    assert error(solo_logits(loaded.trunk.model, TEXT), want) < QUANTIZED_TOLERANCE
    if extension() is not None:
        assert all(is_kept(layer) for _, layer in quantized_layers(loaded.trunk.model))


def test_quantisations_without_operations_for_cpus_become_float32(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantised = _save_quantised(tmp_path, "llama", 32, 1)
    loaded = load(tmp_path)
    assert error(solo_logits(loaded.trunk.model, TEXT), solo_logits(quantised, TEXT)) <= 1e-5
    assert not any(hasattr(module, "bits") for _, module in loaded.trunk.model.named_modules())
    if extension() is not None:
        assert "layers become float32" in caplog.text


@pytest.mark.parametrize("dtype", ["auto", "float32"])
@pytest.mark.parametrize("name", ["deepseek_v3-8bit", "glm4_moe_lite-mxfp4"])
def test_quantised_projections_of_latent_attention(tmp_path: Path, name: str, dtype: str) -> None:
    """They stay quantised with "auto". Both ways to multiply give what mlx-lm's own layer gives."""
    quantised = write_checkpoint(tmp_path, name)
    assert isinstance(quantised.layers[0].self_attn.embed_q, QuantizedMultiLinear)
    model = load(tmp_path, dtype).trunk.model
    stays = dtype == "auto" and extension() is not None
    kinds = {type(layer.self_attn[part]) for layer in model.layers for part in ("embed_q", "unembed_out")}
    assert kinds == ({CpuQuantizedMultiLinear} if stays else {MultiLinear})
    for x, transpose in ((numbers((2, 4, 3, 32)), True), (numbers((2, 1, 5, 32)), False)):
        for layer, before in zip(model.layers, quantised.layers, strict=True):
            for part in ("embed_q", "unembed_out"):
                theirs = before.self_attn[part](x, transpose)
                assert mx.allclose(layer.self_attn[part](x, transpose), theirs, atol=1e-3 if stays else 1e-5)


def numbers(shape: tuple[int, ...]) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(5))


def test_experts_with_a_scale_of_their_own_are_dequantised_with_it(tmp_path: Path) -> None:
    """mlx-lm's `dequantize_model` forgets this scale of nvfp4."""
    holder = nn.Module()
    holder.experts = SwitchLinear(64, 48, 3, bias=True).to_quantized(16, 4, "nvfp4", global_scale=True)
    holder.experts.bias = numbers((3, 48))
    experts = holder.experts
    arrays = zip(experts.weight, experts.scales, experts.global_scale, strict=True)
    dense = [
        mx.dequantize(w, s, None, 16, 4, "nvfp4", global_scale=g, dtype=mx.float32) for w, s, g in arrays
    ]
    dequantize(holder)
    assert type(holder.experts) is SwitchLinear
    assert mx.allclose(holder.experts.weight, mx.stack(dense), rtol=1e-6)
    assert mx.array_equal(holder.experts.bias, experts.bias)


# -- mxfp4 as OpenAI publishes it ------------------------------------------------------------------------

EXPERTS = "model.layers.0.mlp.experts"


@pytest.fixture
def published_gpt_oss(tmp_path: Path) -> tuple[Path, nn.Module]:
    """gpt-oss with the names and shapes of the published files, and the model that it holds."""
    model, config = quantized_tiny_model("gpt_oss-mxfp4", only=".experts.")
    tensors = dict(tree_flatten(model.parameters()))
    published = {name: array for name, array in tensors.items() if ".experts." not in name}
    for index in range(config["num_hidden_layers"]):
        experts = f"model.layers.{index}.mlp.experts"
        for ours, theirs in (("weight", "_blocks"), ("scales", "_scales"), ("bias", "_bias")):
            gate, up, down = (tensors[f"{experts}.{part}_proj.{ours}"] for part in ("gate", "up", "down"))
            gate_up = mx.stack([gate, up], axis=2).flatten(1, 2)  # rows take turns
            for name, array in (("gate_up", gate_up), ("down", down)):
                if ours == "weight":
                    array = array.view(mx.uint8).reshape(*array.shape[:2], -1, 16)
                published[f"{experts}.{name}_proj{theirs}"] = array
    del config["quantization"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    folder = tmp_path / "gpt-oss"
    save_checkpoint(folder, nn.Module(), config)
    mx.save_safetensors(str(folder / "model.safetensors"), published)
    return folder, model


@pytest.mark.skipif(extension() is None, reason="needs the native extension")
def test_the_experts_of_a_published_gpt_oss_stay_in_mxfp4(
    published_gpt_oss: tuple[Path, nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    folder, model = published_gpt_oss
    loaded = load(folder)
    found = list(quantized_layers(loaded.trunk.model))
    assert len(found) == 3 * len(model.layers)
    assert all(is_kept(layer) and layer.mode == "mxfp4" for _, layer in found)
    assert "become float32" not in caplog.text
    assert error(solo_logits(loaded.trunk.model, TEXT), solo_logits(model, TEXT)) < QUANTIZED_TOLERANCE


@pytest.mark.parametrize(
    ("name", "damage", "reason"),
    [
        ("down_proj_scales", lambda x: x.astype(mx.float32), f"{EXPERTS}.down_proj.biases is missing"),
        ("down_proj_scales", lambda x: x.astype(mx.int32), f"{EXPERTS}.down_proj.scales is int32"),
        ("gate_up_proj_scales", lambda x: x[..., :1], f"{EXPERTS}.gate_proj: 4 bits with group size 64"),
        ("gate_up_proj_scales", lambda x: x[:, :-2], "_proj.scales is uint8 [4, 95, 2]"),
        ("gate_up_proj_blocks", lambda x: x[..., :8], f"{EXPERTS}.gate_proj: 2 bits with group size 32"),
        ("gate_up_proj_blocks", lambda x: x[:, :, :1], f"{EXPERTS}.gate_proj: 2 bits with group size 32"),
        ("down_proj_blocks", lambda x: x[:-1], f"{EXPERTS}.down_proj.weight is uint32"),
        ("down_proj_scales", None, f"{EXPERTS}.down_proj.scales is missing"),
    ],
)
def test_a_damaged_gpt_oss_is_refused(
    published_gpt_oss: tuple[Path, nn.Module],
    name: str,
    damage: Callable[[mx.array], mx.array] | None,
    reason: str,
) -> None:
    folder, _ = published_gpt_oss
    file = str(folder / "model.safetensors")
    tensors: dict[str, mx.array] = dict(mx.load(file))  # type: ignore[arg-type]
    mx.eval(tensors)
    old = tensors.pop(f"{EXPERTS}.{name}")
    if damage is not None:
        tensors[f"{EXPERTS}.{name}"] = damage(old)
    mx.save_safetensors(file, tensors)
    assert reason in _damaged(folder)


def test_layers_of_one_model_may_have_different_quantisations(tmp_path: Path) -> None:
    model, settings = tiny_model("llama"), {"group_size": 32, "bits": 4}
    others = {"model.layers.0.mlp.gate_proj": {"group_size": 64, "bits": 8}, "lm_head": False}

    def quantisation(name: str, module: nn.Module) -> bool | dict[str, int]:
        return _fits(module, 32) and others.get(name, True)

    nn.quantize(model, **settings, class_predicate=quantisation)
    save_checkpoint(tmp_path, model, tiny_config("llama") | {"quantization": settings | others})
    loaded = load(tmp_path)
    found = loaded.trunk.model.model.layers[0].mlp
    if extension() is not None:
        assert (found.gate_proj.bits, found.gate_proj.group_size, found.up_proj.bits) == (8, 64, 4)
    assert error(solo_logits(loaded.trunk.model, TEXT), solo_logits(model, TEXT)) < QUANTIZED_TOLERANCE


def _save_quantised(folder: Path, family: str, group_size: int, bits: int, mode: str = "affine") -> nn.Module:
    model = tiny_model(family)
    settings = {"group_size": group_size, "bits": bits, "mode": mode}
    nn.quantize(model, **settings, class_predicate=lambda _, module: _fits(module, group_size))
    save_checkpoint(folder, model, tiny_config(family) | {"quantization": settings})
    return model


def _fits(module: nn.Module, group_size: int) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % group_size == 0


UP = "model.layers.1.mlp.up_proj"  # 64 -> 96


@pytest.fixture
def quantised_folder(tmp_path: Path) -> Path:
    """A sound quantised checkpoint, to be damaged."""
    write_checkpoint(tmp_path / "quantised", "llama-4bit")
    return tmp_path / "quantised"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"bits": 7}, "bits in the quantization in config.json must be one of 1, 2, 3, 4, 5, 6, 8, not 7"),
        ({"bits": None}, "not None"),
        ({"group_size": 48}, "group_size in the quantization in config.json must be one of 16, 32, 64, 128"),
        ({UP: {"bits": 7, "group_size": 32}}, f"bits in the quantization of {UP}"),
        ({UP: {"bits": "4", "group_size": 32}}, "not '4'"),
        ({UP: {"bits": 4, "group_size": 48}}, f"group_size in the quantization of {UP}"),
        (
            {UP: {"bits": 4, "group_size": 128}},
            f"{UP}.weight has rows of 64, which groups of 128 do not divide",
        ),
        (
            {UP: {"bits": 4, "group_size": 16}},
            f"{UP} in config.json must be 32 or 64 or 128 with mode affine, not 16",
        ),
        ({UP: {"bits": 4, "group_size": 64, "mode": "mxfp4"}}, "must be 32 with mode mxfp4, not 64"),
        ({UP: {"bits": 4, "group_size": 32, "mode": "mxfp8"}}, "must be 8 with mode mxfp8, not 4"),
        ({UP: {"bits": 4, "group_size": 32, "mode": "int4"}}, f"mode in the quantization of {UP}"),
        (
            {"mode": "mxfp6"},
            "mode in the quantization in config.json must be one of affine, mxfp4, mxfp8, nvfp4, not 'mxfp6'",
        ),
        ({"mode": ["affine"]}, "not ['affine']"),
        ({UP: {"bits": 4}}, "group_size"),
        ({UP: 4}, f"quantization of {UP} in config.json must be an object, not 4"),
        ({UP: {"bits": 8, "group_size": 32}}, f"{UP}.weight"),
        ({UP: False}, f"{UP}.scales"),
    ],
)
def test_a_quantization_config_that_cannot_be_right(
    quantised_folder: Path, changes: dict[str, Any], reason: str
) -> None:
    quantization = json.loads((quantised_folder / "config.json").read_text())["quantization"]
    _rewrite_config(quantised_folder, quantization=quantization | changes)
    assert reason in _damaged(quantised_folder)


def test_the_tensors_of_a_layer_without_an_entry_tell_its_format(quantised_folder: Path) -> None:
    """As in mlx-lm: a config may name the layer by another path. No group of 128 divides the layers here."""
    expected = solo_logits(load(quantised_folder).trunk.model, TEXT)
    quantization = {"group_size": 128, "bits": 8}
    _rewrite_config(quantised_folder, quantization=quantization, quantization_config=quantization)
    assert error(solo_logits(load(quantised_folder).trunk.model, TEXT), expected) == 0


@pytest.mark.parametrize("content", [4, [4], "4bit"])
def test_a_quantization_config_that_is_no_object(quantised_folder: Path, content: Any) -> None:
    _rewrite_config(quantised_folder, quantization=content)
    assert "quantization in config.json must be an object" in _damaged(quantised_folder)


def test_quantised_weights_without_a_quantization_config(quantised_folder: Path) -> None:
    file = quantised_folder / "config.json"
    config = json.loads(file.read_text())
    del config["quantization"], config["quantization_config"]
    file.write_text(json.dumps(config))
    assert f"{UP}.scales" in _damaged(quantised_folder)


@pytest.mark.parametrize(
    ("part", "damage", "reason"),
    [
        ("scales", None, f"{UP}.scales is missing"),
        ("biases", None, f"{UP}.biases is missing"),
        ("weight", None, f"{UP}.weight is missing"),
        ("scales", lambda x: x.astype(mx.int32), f"{UP}.scales is int32 [96, 2]"),
        ("scales", lambda x: x[:-1], f"{UP}.scales is float32 [95, 2]"),
        ("scales", lambda x: x[:, :0], f"{UP}.scales is float32 [96, 0]"),
        ("scales", lambda x: x[:, 0], f"{UP}.scales is float32 [96]"),
        ("scales", lambda x: mx.repeat(x, 2, axis=1), f"{UP}.scales is float32 [96, 4]"),
        ("biases", lambda x: x[:-1], f"{UP}.biases is float32 [95, 2]"),
        ("biases", lambda x: x.astype(mx.int8), f"{UP}.biases is int8 [96, 2]"),
        ("weight", lambda x: x[:, :-1], f"{UP}.weight is uint32 [96, 7]"),
        ("weight", lambda x: x.astype(mx.float32), f"{UP}.weight is float32 [96, 8]"),
    ],
)
def test_a_quantised_tensor_that_cannot_be_right(
    quantised_folder: Path, part: str, damage: Callable[[mx.array], mx.array] | None, reason: str
) -> None:
    file = str(quantised_folder / "model.safetensors")
    tensors: dict[str, mx.array] = dict(mx.load(file))  # type: ignore[arg-type]
    mx.eval(tensors)
    old = tensors.pop(f"{UP}.{part}")
    if damage is not None:
        tensors[f"{UP}.{part}"] = damage(old)
    mx.save_safetensors(file, tensors, {"format": "mlx"})
    assert reason in _damaged(quantised_folder)


@pytest.mark.parametrize("kept", [4, 0.5, 0.99])
def test_quantised_weights_that_are_cut_short(quantised_folder: Path, kept: float) -> None:
    file = quantised_folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(kept * len(content)) if kept < 1 else int(kept)])
    _damaged(file)


def test_half_precision_weights_become_float32_on_the_cpu(tmp_path: Path) -> None:
    half = tiny_model("llama")
    half.set_dtype(mx.bfloat16)
    save_checkpoint(tmp_path, half, tiny_config("llama"))
    loaded = load(tmp_path)
    assert _dtypes(loaded) == {mx.float32}
    assert loaded.trunk.dtype == mx.float32
    half.set_dtype(mx.float32)
    assert error(solo_logits(loaded.trunk.model, TEXT), solo_logits(half, TEXT)) == 0


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no such folder") as caught:
        load(tmp_path / "nowhere")
    assert str(tmp_path / "nowhere") in str(caught.value)


@pytest.mark.parametrize("name", ["nowhere", "./owner/name", "a/b/c"])
def test_a_name_that_is_neither_a_folder_nor_a_hub_id(name: str) -> None:
    with pytest.raises(ModelLoadError, match="no such folder, and not a Hugging Face id"):
        load(name)


def test_a_file_instead_of_a_folder(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is a file, but a model is"):
        load(folder / "model.safetensors")


def test_a_missing_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert "is missing: this is not a model folder" in _damaged(folder / "config.json")


@pytest.mark.parametrize("content", [b'{"model_type": ', b"", b"\xff\xfe\x00"])
def test_a_broken_config(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    assert "cannot be read" in _damaged(folder / "config.json")


@pytest.mark.parametrize("content", ["{}", "[]", '{"model_type": null}', '{"model_type": ["llama"]}'])
def test_a_config_without_a_model_type(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    assert "has no model_type" in _damaged(folder / "config.json")


def test_a_config_that_lacks_sizes(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llama"}')
    assert "hidden_size" in _damaged(folder)


@pytest.mark.parametrize("model_type", ["jamba", "falcon_mamba", "gemma3n", "brand_new"])
def test_a_refused_family_is_refused_before_its_weights_are_read(folder: Path, model_type: str) -> None:
    _rewrite_config(folder, model_type=model_type)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match="is not served"):
        load(folder)


def test_a_config_that_a_served_family_cannot_serve(folder: Path) -> None:
    _rewrite_config(folder, rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    with pytest.raises(UnsupportedModel, match=r"'llama' is not served: .* rows of different lengths"):
        load(folder)


def test_missing_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "has no weights" in _damaged(folder)


@pytest.mark.parametrize("kept", [0, 4, 100, 0.5, 0.99])
def test_weights_that_are_cut_short(folder: Path, kept: float) -> None:
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(kept * len(content)) if kept < 1 else int(kept)])
    _damaged(file)


def test_the_damaged_file_among_several_is_named(folder: Path) -> None:
    (folder / "model-00002.safetensors").write_bytes(b"not safetensors")
    _damaged(folder / "model-00002.safetensors")


def test_weights_of_another_shape(folder: Path) -> None:
    _rewrite_config(folder, intermediate_size=80)
    message = _damaged(folder)
    assert "mlp" in message
    assert "(80, 64)" in message


def test_a_missing_tensor(folder: Path) -> None:
    model = tiny_model("llama")
    del model.model.norm["weight"]
    save_checkpoint(folder, model, tiny_config("llama"))
    assert "model.norm.weight" in _damaged(folder)


def test_an_unknown_tensor(folder: Path) -> None:
    model = tiny_model("llama")
    model.model.surprise = nn.Linear(2, 2)
    save_checkpoint(folder, model, tiny_config("llama"))
    assert "model.surprise.weight" in _damaged(folder)


def test_a_missing_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert "has no tokenizer" in _damaged(folder)


@pytest.mark.parametrize("content", ["{", '{"model": {"type": "Unheard"}}'])
def test_a_broken_tokenizer(folder: Path, content: str) -> None:
    (folder / "tokenizer.json").write_text(content)
    assert "the tokenizer in" in _damaged(folder)


def test_a_checkpoint_that_brings_code_is_not_run(folder: Path) -> None:
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    _rewrite_config(folder, model_file="evil.py")
    assert "evil.py" in _damaged(folder)


def test_a_hub_id_is_the_folder_that_was_downloaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None, list[str]]] = []

    def download(repo_id: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((repo_id, revision, allow_patterns))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert find_folder("owner/name") == folder
    assert find_folder("owner/name", "v1.0") == folder
    assert [one[:2] for one in asked] == [("owner/name", None), ("owner/name", "v1.0")]
    assert {"*.json", "*.safetensors"} <= set(asked[0][2])


def test_the_commit_of_a_downloaded_model_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "models--owner--name" / "snapshots" / ("0123456789" * 4)
    folder.mkdir(parents=True)
    write_checkpoint(folder, "llama")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(folder))
    caplog.set_level("INFO", logger="outrider")
    load("owner/name", revision="main")
    assert f"owner/name: commit {folder.name}" in caplog.text


@pytest.mark.parametrize("model", ["a folder", "SmolLM2-135M-Instruct"])
def test_only_a_hub_id_has_a_revision(tmp_path: Path, model: str) -> None:
    with pytest.raises(ModelLoadError, match="--revision v1 needs a Hugging Face id"):
        find_folder(tmp_path if model == "a folder" else model, "v1")


@pytest.mark.parametrize("failure", [OSError("offline\nmore"), TimeoutError()])
def test_a_failed_download_says_both_what_is_missing_and_why(
    failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(*_: object, **__: object) -> str:
        raise failure

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ModelLoadError, match=f"owner/name: .*{type(failure).__name__}") as caught:
        find_folder("owner/name")
    assert "more" not in str(caught.value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype_is_what_was_asked_for(tmp_path: Path, dtype: str) -> None:
    write_checkpoint(tmp_path, "llama")
    loaded = load(tmp_path, dtype)
    assert loaded.trunk.dtype == getattr(mx, dtype)
    assert {spec.dtype for spec in loaded.trunk.layout} == {getattr(mx, dtype)}


def test_unknown_dtype_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    with pytest.raises(ModelLoadError, match="float64"):
        load(tmp_path, "float64")
