import hashlib
import itertools
import json
import math
import os

import converted
import gguf_reference
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from gguf_writer import Tensor, TinyModel, plain
from mlx_lm.utils import load_tokenizer

from outrider.cpu import fused_layers
from outrider.cpu.extension import extension
from outrider.cpu.quantized import is_kept, quantized_layers
from outrider.models import groups_of_16
from outrider.models.dtypes import settle_dtype
from outrider.models.errors import UnreadableGGUF
from outrider.models.files import origin
from outrider.models.files.shipped_head import HEADS, shipped_head
from outrider.models.gguf import convert as gguf
from outrider.models.loader import ModelLoadError, trunk_on_disk
from outrider.models.trunk import Trunk
from ragged_rows import RaggedRows

LLAMA = TinyModel()
QWEN2 = TinyModel("qwen2", tied=False)
QWEN3 = TinyModel("qwen3", head_dim=32)
WIDE = TinyModel(hidden=256, inner=256, head_dim=64)  # rows long enough for K-quants
IDS = [5, 300, 17, 2, 2, 99, 0, 41]


def convert(file, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    path = file.write(tmp_path / "model.gguf")
    gguf.convert(path, folder)
    return path, folder


def assert_same_logits(file, tmp_path, atol=1e-4):
    path, folder = convert(file, tmp_path)
    metadata, tensors = gguf_reference.read(path)
    expected = gguf_reference.logits(metadata, tensors, IDS)
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(converted.logits(converted.load(folder), IDS), expected, atol=atol, rtol=1e-4)
    return folder


@pytest.mark.parametrize("model", [LLAMA, QWEN2, QWEN3], ids=lambda model: model.architecture)
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_logits_equal_the_files_own_model(tmp_path, model, kind):
    assert_same_logits(model.file(kind), tmp_path)


def test_k_quants_come_close_to_the_files_own_model(tmp_path):
    folder = assert_same_logits(WIDE.file("Q4_K", "Q6_K", "Q5_K"), tmp_path, atol=0.02)
    modules = json.loads((folder / "config.json").read_text())["quantization"]
    assert modules["bits"] == 4
    assert modules["model.layers.0.self_attn.k_proj"]["bits"] == 5
    assert "model.layers.0.self_attn.q_proj" not in modules  # Q6_K: groups of 16


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q6_K"])
def test_groups_of_16_stay_quantised_on_cpus(tmp_path, kind):
    """A model all of whose matrices are of one such type: linear layers, embedding, output projection."""
    path, folder = convert(WIDE.file(kind), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    assert "quantization" not in config
    assert len(config["groups_of_16"]) == 15
    metadata, tensors = gguf_reference.read(path)
    expected = gguf_reference.logits(metadata, tensors, IDS)
    network = trunk_on_disk(folder).model
    if extension() is not None:
        assert all(layer.group_size == 16 and is_kept(layer) for _, layer in quantized_layers(network))
    for dtype in ("auto", "float32"):
        settle_dtype(network, dtype)
        assert any(quantized_layers(network)) == (dtype == "auto" and extension() is not None)
        np.testing.assert_allclose(converted.logits(network, IDS), expected, atol=0.01, rtol=1e-3)


@pytest.mark.skipif(extension() is None, reason="needs the native extension")
def test_rows_of_a_served_file_do_not_depend_on_the_width_of_passes(tmp_path):
    """As in Q4_K_M files, a layer has matrices with groups of 32 and of 16. Its layers are fused."""
    _, folder = convert(WIDE.file("Q4_K", "Q6_K"), tmp_path)
    network = trunk_on_disk(folder).model
    settle_dtype(network, "auto")
    trunk = Trunk(network, max_context=64)
    trunk.prepare_for_serving()
    assert {type(layer).__call__.__module__ for layer in network.layers} == {fused_layers.__name__}
    assert {layer.group_size for _, layer in quantized_layers(network)} == {16, 32}

    def fed(widths):
        rows = RaggedRows(trunk, num_slots=1, capacity=32)
        rows.join("a", slot=0)
        starts = np.cumsum([0, *widths])
        pieces = [rows.feed({"a": (IDS * 3)[start:end]})["a"] for start, end in itertools.pairwise(starts)]
        return np.concatenate(pieces)

    whole = fed([24])
    for widths in ([1] * 24, [9, 1, 2, 1, 11]):
        np.testing.assert_array_equal(fed(widths), whole)


def test_groups_of_16_become_float16_elsewhere(tmp_path, monkeypatch, caplog):
    path, folder = convert(WIDE.file("Q4_K", "Q6_K", "Q2_K"), tmp_path)
    monkeypatch.setattr(groups_of_16, "is_cpu", lambda: False)
    network = trunk_on_disk(folder).model
    assert "layers become float16: MLX has no quantised format with groups of 16" in caplog.text
    projection = network.layers[0].self_attn.q_proj
    assert type(projection) is nn.Linear
    assert projection.weight.dtype == mx.float16
    metadata, tensors = gguf_reference.read(path)
    settle_dtype(network, "float32")
    np.testing.assert_allclose(
        converted.logits(network, IDS), gguf_reference.logits(metadata, tensors, IDS), atol=0.02, rtol=1e-3
    )


Q_PROJ = "model.layers.0.self_attn.q_proj"


def _halve_scales(config, weights):
    weights[f"{Q_PROJ}.scales"] = weights[f"{Q_PROJ}.scales"][:, ::2]


def _halve_codes(config, weights):
    weights[f"{Q_PROJ}.weight"] = weights[f"{Q_PROJ}.weight"][:, :-1]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda config, weights: config.update(groups_of_16=[1]), "must be an object"),
        (lambda config, weights: config["groups_of_16"].update(nothing=6), "nothing, which is no layer"),
        (lambda config, weights: config["groups_of_16"].update({Q_PROJ: 7}), f"{Q_PROJ} 7 bits"),
        (
            lambda config, weights: config["groups_of_16"].update({Q_PROJ: 3}),
            "no weights of 3 bits in groups",
        ),
        (lambda config, weights: weights.pop(f"{Q_PROJ}.scales"), f"{Q_PROJ}.scales is missing"),
        (_halve_scales, f"{Q_PROJ} has no weights of 6 bits in groups of 16"),
        (_halve_codes, f"{Q_PROJ}.weight is uint32"),
    ],
)
def test_damaged_groups_of_16_are_refused(tmp_path, change, reason):
    _, folder = convert(WIDE.file("Q6_K"), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    weights = mx.load(str(folder / "model.safetensors"))
    change(config, weights)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    with pytest.raises(ModelLoadError, match=reason):
        trunk_on_disk(folder)


@pytest.mark.parametrize("kind", ["IQ4_NL", "IQ4_XS"])
def test_types_without_an_mlx_form_become_float16(tmp_path, kind, caplog):
    """The same values, dequantised beforehand and stored as F16, give the same folder."""
    rng = np.random.default_rng(4)
    stored, dense = WIDE.file("Q8_0"), WIDE.file("Q8_0")
    at = next(i for i, tensor in enumerate(stored.tensors) if tensor.name == "blk.0.ffn_up.weight")
    type_id = GGMLQuantizationType[kind]
    block, block_bytes = GGML_QUANT_SIZES[type_id]
    raw = rng.integers(0, 64, size=(256, 256 // block * block_bytes), dtype=np.uint8)
    stored.tensors[at] = Tensor("blk.0.ffn_up.weight", (256, 256), type_id.value, raw.tobytes())
    dense.tensors[at] = plain("blk.0.ffn_up.weight", dequantize(raw, type_id), "F16")
    weights = []
    for name, file in (("stored", stored), ("dense", dense)):
        (tmp_path / name).mkdir()
        _, folder = convert(file, tmp_path / name)
        weights.append(mx.load(str(folder / "model.safetensors")))
    assert f"{kind} (1 tensors): these weights become float16" in caplog.text
    assert weights[0].keys() == weights[1].keys()
    assert all(mx.array_equal(array, weights[1][name]).item() for name, array in weights[0].items())


def test_mxfp4_is_listed_with_its_mode(tmp_path):
    """One matrix of random MXFP4 blocks in a file of Q4_1: the loaded layer has the values of the file."""
    file = LLAMA.file("Q4_1")
    at = next(i for i, tensor in enumerate(file.tensors) if tensor.name == "blk.0.ffn_up.weight")
    raw = np.random.default_rng(4).integers(0, 256, size=(96, 2, 17), dtype=np.uint8)
    raw[..., 0] = raw[..., 0] % 8 + 118
    kind = GGMLQuantizationType.MXFP4
    file.tensors[at] = Tensor("blk.0.ffn_up.weight", (96, 64), kind.value, raw.tobytes())
    _, folder = convert(file, tmp_path)
    name = "model.layers.0.mlp.up_proj"
    entry = json.loads((folder / "config.json").read_text())["quantization"]
    assert entry["mode"] == "affine"
    assert entry[name] == {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    loaded = converted.load(folder).layers[0].mlp.up_proj.weight.astype(mx.float32)
    np.testing.assert_array_equal(np.array(loaded), dequantize(raw.reshape(96, -1), kind))


def test_mixed_quantisations_are_listed_by_module(tmp_path):
    folder = assert_same_logits(LLAMA.file("Q8_0", *["Q4_1"] * 13), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization"] == {
        "group_size": 32,
        "bits": 4,
        "mode": "affine",
        "model.embed_tokens": {"group_size": 32, "bits": 8},
        "model.layers.1.mlp.down_proj": {"group_size": 32, "bits": 8},
    }


def test_biases_of_llama_files_are_kept_and_reordered(tmp_path):
    file = LLAMA.file("F32")
    rng = np.random.default_rng(3)
    sizes = {"attn_q": 64, "attn_k": 32, "attn_v": 32, "attn_output": 64}
    for index in range(LLAMA.num_layers):
        file.tensors += [plain(f"blk.{index}.{name}.bias", rng.normal(size=n)) for name, n in sizes.items()]
    folder = assert_same_logits(file, tmp_path)
    assert json.loads((folder / "config.json").read_text())["attention_bias"] is True


def test_a_quantised_folder_has_one_float_dtype_when_that_is_lossless(tmp_path):
    file = LLAMA.file("Q4_1")
    file.tensors = [_coarse(tensor) for tensor in file.tensors]
    _, folder = convert(file, tmp_path)
    weights = mx.load(str(folder / "model.safetensors"))
    assert {array.dtype for array in weights.values()} == {mx.uint32, mx.float16}


def test_norms_that_float16_cannot_hold_stay_float32(tmp_path):
    _, folder = convert(LLAMA.file("Q4_1"), tmp_path)
    weights = mx.load(str(folder / "model.safetensors"))
    assert weights["model.norm.weight"].dtype == mx.float32


def _coarse(tensor):
    """A float32 tensor with its values rounded to float16."""
    if tensor.type_id != 0:
        return tensor
    values = np.frombuffer(tensor.data, np.float32).astype(np.float16)
    return plain(tensor.name, values.reshape(tensor.shape))


def test_config_has_the_numbers_that_were_meant(tmp_path):
    _, folder = convert(QWEN3.file("F32"), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "qwen3"
    assert config["rms_norm_eps"] == 1e-6
    assert config["rope_theta"] == 10000.0
    assert config["head_dim"] == 32
    assert config["vocab_size"] == 320
    assert config["tie_word_embeddings"] is True
    assert config["eos_token_id"] == [1, 0]
    assert "rope_scaling" not in config


@pytest.mark.parametrize(
    ("keys", "scaling"),
    [
        ({"rope.scaling.type": "none"}, None),
        ({"rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 64,
                "rope.scaling.yarn_beta_fast": 16.0,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0},
        ),
    ],
)
def test_rope_scaling_is_carried_over(tmp_path, keys, scaling):
    file = QWEN2.file("F32")
    file.metadata |= {f"qwen2.{key}": value for key, value in keys.items()}
    _, folder = convert(file, tmp_path)
    assert json.loads((folder / "config.json").read_text()).get("rope_scaling") == scaling
    converted.logits(converted.load(folder), IDS)


def _llama3_factors(factor, head_dim=16, theta=10000.0):
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


def test_llama3_rope_scaling_is_recovered_from_its_factors(tmp_path):
    file = LLAMA.file("F32")
    file.tensors.append(plain("rope_freqs.weight", _llama3_factors(8.0)))
    _, folder = convert(file, tmp_path)
    scaling = json.loads((folder / "config.json").read_text())["rope_scaling"]
    assert (scaling["rope_type"], scaling["factor"]) == ("llama3", 8.0)
    converted.logits(converted.load(folder), IDS)


def _with(file, **changes):
    for key, value in changes.items():
        file.metadata[key.replace("__", ".")] = value
    return file


def _without(file, name):
    file.tensors = [tensor for tensor in file.tensors if tensor.name != name]
    return file


REFUSALS = {
    "unknown architecture": (
        lambda: _with(LLAMA.file("F32"), general__architecture="gemma3"),
        "'gemma3'.*qwen3",
    ),
    "no architecture": (lambda: _with(LLAMA.file("F32"), general__architecture=""), "none given"),
    "mixture of experts": (lambda: _with(LLAMA.file("F32"), llama__expert_count=8), "expert_count"),
    "sliding window": (
        lambda: _with(LLAMA.file("F32"), llama__attention__sliding_window=4096),
        "sliding_window",
    ),
    "split file": (lambda: _with(LLAMA.file("F32"), split__count=2), "Merge the parts"),
    "layers that differ": (
        lambda: _with(LLAMA.file("F32"), llama__attention__head_count_kv=[2, 1]),
        "layers differ",
    ),
    "partial rotation": (
        lambda: _with(LLAMA.file("F32"), llama__rope__dimension_count=8),
        "dimension_count is 8",
    ),
    "missing key": (lambda: _with(LLAMA.file("F32"), llama__block_count=3), "lacks tensors.*blk.2"),
    "unknown rope scaling": (
        lambda: _with(LLAMA.file("F32"), llama__rope__scaling__type="longrope"),
        "longrope",
    ),
    "missing tensor": (lambda: _without(LLAMA.file("F32"), "blk.1.ffn_up.weight"), "blk.1.ffn_up.weight"),
    "no embedding": (lambda: _without(LLAMA.file("F32"), "token_embd.weight"), "token embedding"),
    "unknown pre-tokenizer": (lambda: _with(LLAMA.file("F32"), tokenizer__ggml__pre="martian"), "'martian'"),
    "unknown tokenizer": (lambda: _with(LLAMA.file("F32"), tokenizer__ggml__model="t5"), "'t5'"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_is_not_supported_is_refused_before_anything_is_written(tmp_path, case):
    make, message = REFUSALS[case]
    path = make().write(tmp_path / "model.gguf")
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(UnreadableGGUF, match=message):
        gguf.convert(path, folder)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("type_id", "block_bytes", "name"),
    [(15, 292, "Q8_K"), (24, 256, "I8"), (99, 0, "type 99")],
)
def test_unsupported_quantisations_are_named(tmp_path, type_id, block_bytes, name):
    file = WIDE.file("F32")
    at = next(i for i, tensor in enumerate(file.tensors) if tensor.name == "blk.0.ffn_up.weight")
    file.tensors[at] = Tensor("blk.0.ffn_up.weight", (256, 256), type_id, bytes(256 * block_bytes))
    with pytest.raises(UnreadableGGUF, match=f"{name} \\(1 tensors\\).*Q4_K"):
        convert(file, tmp_path)


def test_unexpected_tensors_are_refused_not_dropped(tmp_path):
    file = LLAMA.file("F32")
    file.tensors.append(plain("blk.0.attn_sinks.weight", [1.0]))
    with pytest.raises(UnreadableGGUF, match="attn_sinks"):
        convert(file, tmp_path)


def test_rope_factors_of_another_kind_are_refused(tmp_path):
    file = LLAMA.file("F32")
    file.tensors.append(plain("rope_freqs.weight", [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]))
    with pytest.raises(UnreadableGGUF, match="Llama 3 rule"):
        convert(file, tmp_path)


def test_a_converted_file_is_kept_until_it_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    path = LLAMA.file("F32").write(tmp_path / "tiny.gguf")
    folder = gguf.ensure_converted(path)
    assert origin.read(folder).source == str(path)
    assert load_tokenizer(folder).encode("hi", add_special_tokens=False)
    written_at = (folder / "config.json").stat().st_mtime_ns
    assert gguf.ensure_converted(path) == folder
    assert (folder / "config.json").stat().st_mtime_ns == written_at
    os.utime(path, ns=(1, 1))
    assert gguf.ensure_converted(path) != folder


def test_the_head_for_a_known_file_is_found_wherever_the_file_lies(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    path = LLAMA.file("F32").write(tmp_path / "tiny.gguf")
    head = tmp_path / "head.safetensors"
    head.touch()
    monkeypatch.setitem(HEADS, hashlib.sha256(path.read_bytes()).hexdigest(), head)
    assert shipped_head(gguf.ensure_converted(path)) == head


def test_a_refused_file_leaves_nothing_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    path = _with(LLAMA.file("F32"), general__architecture="gemma3").write(tmp_path / "tiny.gguf")
    with pytest.raises(UnreadableGGUF):
        gguf.ensure_converted(path)
    left = [entry for entry in (tmp_path / "cache" / "models").iterdir() if entry.suffix != ".lock"]
    assert left == []
