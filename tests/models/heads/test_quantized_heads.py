"""Quantised heads: kept quantised in every layout, refused by name if damaged, written by `--bits`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.mla import QuantizedMultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from models.head_checkpoints import FAMILIES, TinyHead, packed, tiny_head, write
from models.heads.test_extract import write_converted, write_original
from models.heads.test_head_families import Cells
from outrider.cli.main import main
from outrider.models import dtypes
from outrider.models.heads import (
    HeadError,
    LoadedHead,
    MTPHead,
    Quantization,
    load_head,
    new_head,
    quantize_layers,
)
from outrider.models.heads.extract import extract
from outrider.models.heads.head_files import read_header
from outrider.models.heads.originals import LocalOriginal
from outrider.models.trunk import Trunk
from ragged_rows import error
from tiny_models import fill, tiny_model

Tensors = dict[str, mx.array]
BITS = (4, 5, 6, 8)
EVERY_FAMILY = [(family, BITS[number % 4]) for number, family in enumerate(FAMILIES)]
MORE_BITS = [("qwen3_5_moe", bits) for bits in BITS] + [("mimo", bits) for bits in BITS]


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantised layers stay quantised, as on a GPU."""
    keep_quantized(monkeypatch, True)


@pytest.fixture
def dequantised(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_quantized(monkeypatch, False)


def keep_quantized(monkeypatch: pytest.MonkeyPatch, keeps: bool) -> None:
    monkeypatch.setattr(dtypes, "keeps_quantized", lambda dtype: keeps)
    monkeypatch.setattr(dtypes, "extension", lambda: None)  # MLX's own arithmetic, which is exact


def parameters(head: LoadedHead | MTPHead, depth: int = 0) -> Tensors:
    layer = head.layers[depth] if isinstance(head, LoadedHead) else head
    return dict(tree_flatten(layer.parameters()))


def mixed(name: str) -> tuple[int, int]:
    """Another format for each projection."""
    formats = {"q_proj": (8, 32), "o_proj": (6, 64), "down_proj": (5, 32), "fc.": (4, 128)}
    return next((found for part, found in formats.items() if part in name), (4, 64))


def outputs(head: LoadedHead, trunk: Trunk) -> np.ndarray:
    rng = np.random.default_rng(3)
    hidden, embedded = rng.standard_normal((2, 5, 64))
    return np.array(Cells(head.layers[0], trunk).feed(hidden, embedded, 0))


def formats(head: LoadedHead, depth: int = 0) -> dict[str, tuple[int, int]]:
    return {
        path: (layer.bits, layer.group_size)
        for path, layer in head.layers[depth].named_modules()
        if hasattr(layer, "bits")
    }


# -- reading ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "bits"), [*EVERY_FAMILY, *MORE_BITS])
def test_a_quantised_head_stays_quantised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, bits: int
) -> None:
    tiny = tiny_head(family)
    file = write(tmp_path / "mtp.safetensors", packed(tiny.converted(), lambda name: (bits, 32)))
    keep_quantized(monkeypatch, False)
    plain = load_head(file, tiny.trunk, config=tiny.config)
    keep_quantized(monkeypatch, True)
    head = load_head(file, tiny.trunk, config=tiny.config)
    assert set(formats(head).values()) == {(bits, 32)}
    assert formats(head)["fc"] == (bits, 32)
    assert {array.dtype for array in parameters(head).values()} == {mx.float32, mx.uint32}
    has_experts = any("switch_mlp" in path for path in formats(head))
    kinds = [type(layer) for layer in head.layers[0].modules()]
    assert (QuantizedSwitchLinear in kinds) == has_experts
    assert formats(plain) == {}
    assert {array.dtype for array in parameters(plain).values()} == {mx.float32}
    assert error(outputs(head, tiny.trunk), outputs(plain, tiny.trunk)) <= 1e-4


def test_every_layer_has_its_own_format(tmp_path: Path, kept: None) -> None:
    tiny = tiny_head("qwen3_5_moe")
    head = load_head(write(tmp_path / "mtp.safetensors", packed(tiny.converted(), mixed)), tiny.trunk)
    found = formats(head)
    assert found["fc"] == (4, 128)
    assert found["layers.0.self_attn.q_proj"] == (8, 32)
    assert found["layers.0.self_attn.o_proj"] == (6, 64)
    assert found["layers.0.mlp.switch_mlp.down_proj"] == (5, 32)
    assert found["layers.0.mlp.switch_mlp.up_proj"] == (4, 64)


def test_experts_that_are_stored_one_by_one_may_be_quantised(tmp_path: Path, kept: None) -> None:
    tiny = tiny_head("glm4_moe")
    single, stacked = (packed(form, lambda name: (4, 32)) for form in (tiny.published(), tiny.converted()))
    one, other = (
        load_head(write(tmp_path / f"{number}.safetensors", tensors), tiny.trunk)
        for number, tensors in enumerate((single, stacked))
    )
    for name, array in parameters(one).items():
        np.testing.assert_array_equal(np.array(array), np.array(parameters(other)[name]), err_msg=name)


def test_microscaling_formats_are_kept_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = tiny_head("mimo")
    tensors = tiny.converted()
    path = "model.mtp_layers.0.input_proj"
    tensors[f"{path}.weight"], tensors[f"{path}.scales"] = mx.quantize(
        tensors[f"{path}.weight"], group_size=32, bits=4, mode="mxfp4"
    )
    file = write(tmp_path / "mtp.safetensors", tensors)
    keep_quantized(monkeypatch, False)
    plain = load_head(file, tiny.trunk)
    keep_quantized(monkeypatch, True)
    head = load_head(file, tiny.trunk)
    assert head.layers[0].fc.mode == "mxfp4"
    assert formats(head) == {"fc": (4, 32)}
    assert plain.layers[0].fc.weight.dtype == mx.float32
    assert error(outputs(head, tiny.trunk), outputs(plain, tiny.trunk)) <= 1e-4


def latent_head() -> tuple[Trunk, MTPHead]:
    """Latent attention whose projections for each attention head can be quantised."""
    trunk = Trunk(tiny_model("deepseek_v3", kv_lora_rank=32, qk_nope_head_dim=32), max_context=64)
    head = new_head(trunk)
    fill(head, seed=5)
    return trunk, head


def test_the_projections_of_latent_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trunk, saved = latent_head()
    quantize_layers(saved, Quantization(6, 32), trunk)
    assert isinstance(saved.layers[0].self_attn.embed_q, QuantizedMultiLinear)
    file = write(tmp_path / "mtp.safetensors", {f"mtp.{n}": a for n, a in parameters(saved).items()})
    keep_quantized(monkeypatch, False)
    plain = load_head(file, trunk)
    assert {array.dtype for array in parameters(plain).values()} == {mx.float32}
    keep_quantized(monkeypatch, True)
    head = load_head(file, trunk)
    assert isinstance(head.layers[0].layers[0].self_attn.unembed_out, QuantizedMultiLinear)
    assert error(outputs(head, trunk), outputs(plain, trunk)) <= 1e-4


def test_a_quantised_head_takes_the_trunks_dtype(tmp_path: Path, kept: None) -> None:
    model = tiny_model("glm4_moe")
    model.set_dtype(mx.bfloat16)
    tensors = packed(tiny_head("glm4_moe").converted(), lambda name: (4, 32))
    head = load_head(write(tmp_path / "mtp.safetensors", tensors), Trunk(model, max_context=64))
    found = parameters(head)
    assert found.pop("layers.0.mlp.gate.e_score_correction_bias").dtype == mx.float32
    assert {array.dtype for array in found.values()} == {mx.bfloat16, mx.uint32}
    assert found["fc.scales"].dtype == mx.bfloat16


# -- what is refused -------------------------------------------------------------------------------------

Change = Callable[[Tensors, str], None]
PATH = "model.layers.3.self_attn.q_proj"


def _without(part: str) -> Change:
    def change(tensors: Tensors, path: str) -> None:
        del tensors[f"{path}.{part}"]

    return change


def _with(part: str, new: Callable[[mx.array], mx.array]) -> Change:
    def change(tensors: Tensors, path: str) -> None:
        tensors[f"{path}.{part}"] = new(tensors[f"{path}.{part}"])

    return change


def _groups_of_16(tensors: Tensors, path: str) -> None:
    for part in ("scales", "biases"):
        tensors[f"{path}.{part}"] = mx.repeat(tensors[f"{path}.{part}"], 2, axis=-1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without("biases"), r"only part of a head: {path}\.biases is missing"),
        (_without("scales"), r"{path}\.scales is missing, and the weight is quantised"),
        (_without("weight"), r"only part of a head: {path}\.weight is missing"),
        (_with("weight", lambda a: mx.zeros((64, 14), mx.uint32)), r"{path}\.weight has 7 bits"),
        (_with("weight", lambda a: mx.zeros((64, 9), mx.uint32)), r"{path}\.weight has 4\.5 bits"),
        (_with("weight", lambda a: a[:32]), r"{path}\.weight is \[32, 8\], this model needs \[64, 8\]"),
        (_with("weight", lambda a: a.astype(mx.int32)), r"{path}\.weight has scales.*int32, not uint32"),
        (_with("scales", lambda a: a[:, :0]), r"{path}\.scales has 0 groups"),
        (_with("scales", lambda a: mx.zeros((64, 3))), r"{path}\.scales has 3 groups.*the 64 inputs"),
        (_with("scales", lambda a: a[:32]), r"{path}\.scales is \[32, 2\], this model needs \[64, 2\]"),
        (_with("scales", lambda a: a.astype(mx.int32)), r"{path}\.scales is int32, which is no dtype"),
        (_with("biases", lambda a: a.astype(mx.int32)), r"{path}\.biases is int32.*scales are float32"),
        (_with("biases", lambda a: a[:, :1]), r"{path}\.biases is \[64, 1\], this model needs \[64, 2\]"),
        (_groups_of_16, r"{path}\.scales has groups of 16"),
    ],
)
def test_a_damaged_tensor_is_named(tmp_path: Path, change: Change, message: str) -> None:
    tiny = tiny_head("glm4_moe")
    tensors = packed(tiny.converted(), lambda name: (4, 32))
    change(tensors, PATH)
    with pytest.raises(HeadError, match=message.format(path=PATH.replace(".", r"\."))) as caught:
        load_head(write(tmp_path / "mtp.safetensors", tensors), tiny.trunk)
    assert str(tmp_path / "mtp.safetensors") in str(caught.value)


def test_a_quantised_head_that_is_cut_short(tmp_path: Path) -> None:
    tiny = tiny_head("mimo")
    file = write(tmp_path / "mtp.safetensors", packed(tiny.converted(), lambda name: (4, 32)))
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(HeadError, match=r"mtp\.safetensors cannot be read as safetensors: the file is cut"):
        load_head(file, tiny.trunk)


def test_integers_without_scales_are_no_weights(tmp_path: Path) -> None:
    tiny = tiny_head("mimo")
    name = "model.mtp_layers.0.input_proj.weight"
    tensors = tiny.converted() | {name: mx.zeros((64, 128), mx.uint8)}
    with pytest.raises(HeadError, match=r"input_proj\.weight is uint8, and there are no scales"):
        load_head(write(tmp_path / "mtp.safetensors", tensors), tiny.trunk)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"bits": 4, "group_size": 32}, None),
        ({"bits": 8, "group_size": 32, "mtp.fc": {"bits": 4, "group_size": 32}}, r"_proj\.weight with 8"),
        ({"bits": 4, "group_size": 32, "mtp.fc": {"bits": 2, "group_size": 64}}, r"mtp\.fc\.weight with 2"),
        ({"bits": 4}, r'metadata "head_quantization" of .* cannot be read'),
        ([], r'metadata "head_quantization" of .* cannot be read'),
    ],
)
def test_the_metadata_must_agree_with_the_tensors(tmp_path: Path, entry: Any, message: str | None) -> None:
    """The same bytes can stand for more inputs of fewer bits, as another model has them."""
    tiny = tiny_head("qwen3_5")
    tensors = packed(tiny.converted(), lambda name: (4, 32))
    metadata = {"format": "mlx", "head_quantization": json.dumps(entry)}
    file = write(tmp_path / "mtp.safetensors", tensors, metadata)
    if message is None:
        load_head(file, tiny.trunk)
        return
    with pytest.raises(HeadError, match=message):
        load_head(file, tiny.trunk)


# -- extract ---------------------------------------------------------------------------------------------


def rounded(layers: Mapping[str, mx.array], names: set[str], bits: int, group_size: int) -> Tensors:
    """The parameters of a plain head after they were quantised and dequantised."""
    how = {"group_size": group_size, "bits": bits}
    return {
        name: mx.dequantize(*mx.quantize(array, **how), **how) if name in names else array
        for name, array in layers.items()
    }


@pytest.mark.parametrize(("family", "bits"), EVERY_FAMILY)
def test_an_extracted_head_is_the_originals_quantised(
    tmp_path: Path, family: str, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = tiny_head(family, num_depths=2 if family in ("mimo", "glm4_moe") else 1)
    source, into = write_original(tmp_path / "original", head), write_converted(tmp_path / "model", head)
    plain = load_head(source, head.trunk, config=head.config)

    done = extract(LocalOriginal(source), into, how=Quantization(bits, 32))

    assert done.quantized is not None
    assert done.num_bytes < 0.6 * done.num_bytes_before
    metadata = read_header(done.file)[1]
    entry = json.loads(metadata["head_quantization"])
    assert (entry["bits"], entry["group_size"], entry["mode"]) == (bits, 32, "affine")
    keep_quantized(monkeypatch, False)
    got = load_head(into, head.trunk, config=head.config)
    keep_quantized(monkeypatch, True)
    kept = load_head(into, head.trunk, config=head.config)
    for depth in range(len(plain.layers)):
        by_layer = formats(kept, depth)
        assert len(by_layer) >= 5
        others = {path: found for path, found in by_layer.items() if found != (bits, 32)}
        assert set(others.values()) <= {(8, 64)}  # routers
        wanted = rounded(
            parameters(plain, depth), {f"{p}.weight" for p in by_layer.keys() - others}, bits, 32
        )
        wanted = rounded(wanted, {f"{path}.weight" for path in others}, 8, 64)
        for name, array in parameters(got, depth).items():
            np.testing.assert_array_equal(np.array(array), np.array(wanted[name]), err_msg=name)


def test_eight_bit_floats_are_requantised(tmp_path: Path, dequantised: None) -> None:
    head = tiny_head("deepseek_v3")
    source, into = write_original(tmp_path / "original", head), write_converted(tmp_path / "model", head)
    shard = source / "model-00002-of-00002.safetensors"
    tensors: Any = mx.load(str(shard))
    name = "model.layers.3.eh_proj.weight"
    tensors |= {name: mx.to_fp8(tensors[name]), f"{name}_scale_inv": mx.array([[0.5]])}
    write(shard, tensors, {"format": "pt"})
    plain = load_head(source, head.trunk, config=head.config)
    extract(LocalOriginal(source), into, how=Quantization(8))
    got = load_head(into, head.trunk, config=head.config)
    assert error(np.array(got.layers[0].fc.weight), np.array(plain.layers[0].fc.weight)) < 0.02


def test_layers_that_the_group_size_does_not_divide_stay_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = tiny_head("glm4_moe")
    source, into = write_original(tmp_path / "original", head), write_converted(tmp_path / "model", head)
    assert main(["mtp", "extract", str(source), "--into", str(into), "--bits", "4"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"Quantised to 4 bits in groups of 64: 0\.\d MB before, 0\.\d MB now\.", said)
    assert "model.layers.3.mlp.switch_mlp.down_proj" in said  # of 32 inputs
    tensors: Any = mx.load(str(into / "mtp" / "weights.safetensors"))
    assert tensors["model.layers.3.mlp.switch_mlp.down_proj.weight"].dtype == mx.float32
    assert tensors["model.layers.3.mlp.switch_mlp.up_proj.weight"].dtype == mx.uint32
    assert main(["mtp", "inspect", str(into), "--files-only"]) == 0
    assert "4 bits in groups of 64" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--group-size", "64"], "--group-size needs --bits"),
        (["--bits", "4", "--group-size", "128"], None),
    ],
)
def test_options_of_extract(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str | None
) -> None:
    head = tiny_head("mimo")
    source, into = write_original(tmp_path / "original", head), write_converted(tmp_path / "model", head)
    status = main(["mtp", "extract", str(source), "--into", str(into), *options])
    assert status == (2 if message else 0)
    assert (message or "") in capsys.readouterr().err


def test_unknown_bits_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["mtp", "extract", "a/b", "--into", "c", "--bits", "7"])
    assert "--bits: invalid choice: 7" in capsys.readouterr().err
    with pytest.raises(HeadError, match="--bits must be one of 4, 5, 6, 8, not 3"):
        Quantization(3)
    with pytest.raises(HeadError, match="--group-size must be one of 32, 64, 128, not 48"):
        Quantization(4, 48)


def test_a_group_size_that_divides_no_layer_is_refused() -> None:
    trunk = Trunk(tiny_model("llama", hidden_size=32, intermediate_size=48, head_dim=8), max_context=64)
    with pytest.raises(HeadError, match=r"in groups of 128.*Choose a smaller --group-size"):
        quantize_layers(new_head(trunk), Quantization(4, 128), trunk)


def test_a_quantised_original_is_not_quantised_again(tmp_path: Path) -> None:
    head = tiny_head("mimo")
    source, into = write_original(tmp_path / "original", head), write_converted(tmp_path / "model", head)
    shard = source / "model-00002-of-00002.safetensors"
    tensors: Any = mx.load(str(shard))
    write(shard, packed(tensors, lambda name: (4, 32)), {"format": "mlx"})
    with pytest.raises(HeadError, match=r"quantised already: it has .*\.scales\. Extract it without --bits"):
        extract(LocalOriginal(source), into, how=Quantization(4))
    extract(LocalOriginal(source), into)
    assert load_head(into, head.trunk, config=head.config).draft_ids is None


def test_draft_ids_of_the_original_are_kept(tmp_path: Path) -> None:
    head: TinyHead = tiny_head("qwen3_5")
    source, into = write_original(tmp_path / "original", head), write_converted(tmp_path / "model", head)
    shard = source / "model-00002-of-00002.safetensors"
    tensors: Any = mx.load(str(shard))
    write(shard, tensors | {"mtp.draft_ids": mx.array([7, 3])}, {"format": "pt"})
    extract(LocalOriginal(source), into, how=Quantization(4))
    ids = load_head(into, head.trunk, config=head.config).draft_ids
    assert ids is not None
    assert ids.tolist() == [3, 7]


def test_a_layer_is_linear_or_stays() -> None:
    """Norms and the parameters of routers have no quantised form."""
    trunk, head = latent_head()
    done = quantize_layers(head, Quantization(4, 32), trunk)
    quantised = {path for path, layer in head.named_modules() if hasattr(layer, "bits")}
    assert not any("norm" in path or path.endswith("mlp.gate") for path in quantised | set(done.left))
