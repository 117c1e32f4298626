"""Heads as other tools store them: where they lie, and how their norms and experts are written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from models.head_checkpoints import TinyHead, packed, tiny_head, write
from models.heads.test_head_files import MLX_CONV, RAW_CONV, expected_head, folder_of, same_parameters
from outrider.models import dtypes
from outrider.models.heads import find_head, load_head, locate, separate_drafter
from tiny_models import save_checkpoint

Tensors = dict[str, mx.array]
CONV = "language_model.model.layers.0.linear_attn.conv1d.weight"


@pytest.fixture
def dense() -> TinyHead:
    return tiny_head("qwen3_5")


@pytest.fixture
def moe() -> TinyHead:
    return tiny_head("qwen3_5_moe")


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantised layers stay quantised, in MLX's own arithmetic."""
    monkeypatch.setattr(dtypes, "keeps_quantized", lambda dtype: True)
    monkeypatch.setattr(dtypes, "extension", lambda: None)


def fused(tiny: TinyHead) -> Tensors:
    """As vllm-mlx writes heads with fused experts: the maker's names, norms with their 1."""
    return {name: array + 1 if "norm" in name else array for name, array in tiny.published().items()}


def with_config(folder: Path, tiny: TinyHead, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(tiny.config | changes))
    return folder


# -- places ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "place", ["mtp/weights.safetensors", "mtp.safetensors", "mtp/model.safetensors", "optiq/mtp.safetensors"]
)
def test_a_head_is_found_where_tools_put_it(tmp_path: Path, dense: TinyHead, place: str) -> None:
    folder = folder_of(dense, tmp_path / "model", [{CONV: MLX_CONV}])
    write(folder / place, dense.converted(), {"format": "mlx"})
    found = locate(folder)
    assert found is not None
    assert found.source == folder / place
    assert not found.is_inside
    assert same_parameters(load_head(folder, dense.trunk), expected_head(dense, tmp_path))


def test_the_config_may_name_the_file(tmp_path: Path, dense: TinyHead) -> None:
    folder = with_config(
        tmp_path / "model", dense, mlx_lm_extra_tensors={"mtp_file": "extra/head.safetensors"}
    )
    write(folder / "mtp.safetensors", dense.converted(), {"format": "mlx"})
    assert find_head(folder) == folder / "mtp.safetensors"  # the named one is missing
    named = write(folder / "extra" / "head.safetensors", dense.converted(), {"format": "mlx"})
    assert find_head(folder) == named


@pytest.mark.parametrize("name", ["../head.safetensors", "/head.safetensors", 7, None])
def test_a_file_outside_the_folder_is_not_taken(tmp_path: Path, dense: TinyHead, name: Any) -> None:
    write(tmp_path / "head.safetensors", dense.converted(), {"format": "mlx"})
    if name == "/head.safetensors":
        name = str(tmp_path / "head.safetensors")
    folder = with_config(tmp_path / "model", dense, mlx_lm_extra_tensors={"mtp_file": name})
    assert find_head(folder) is None


def test_a_drafter_folder_beside_the_model_is_found_only_if_it_has_a_head(
    tmp_path: Path, dense: TinyHead
) -> None:
    folder = tmp_path / "model"
    save_checkpoint(folder, dense.model, dense.config)
    assert separate_drafter(folder) is None
    drafter = with_config(tmp_path / "model-mtp", dense)
    assert separate_drafter(folder) is None
    alone = {name.removeprefix("mtp."): array for name, array in dense.converted().items()}
    write(drafter / "model.safetensors", alone, {"format": "mlx"})
    assert separate_drafter(folder) == drafter
    assert same_parameters(load_head(drafter, dense.trunk), expected_head(dense, tmp_path))
    (drafter / "model.safetensors").write_bytes(b"damaged")
    assert separate_drafter(folder) is None


# -- norms -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["published", "converted"])
def test_a_shard_that_another_tool_added_is_told_by_its_own_format(
    tmp_path: Path, dense: TinyHead, form: str
) -> None:
    """The maker's shard copied into a conversion, or a converted head added to the maker's folder."""
    is_raw = form == "published"
    folder = with_config(tmp_path / "model", dense)
    trunk = {CONV: MLX_CONV if is_raw else RAW_CONV}
    write(folder / "model.safetensors", trunk, {"format": "mlx" if is_raw else "pt"})
    head = dense.published() if is_raw else dense.converted()
    write(folder / "model-mtp.safetensors", head, {"format": "pt" if is_raw else "mlx"})
    assert same_parameters(load_head(folder, dense.trunk), expected_head(dense, tmp_path))


def test_shards_of_one_tool_are_told_by_the_convolutions(tmp_path: Path, dense: TinyHead) -> None:
    """Some converters write the maker's format, and a shard may hold nothing but tensors of the head."""
    folder = folder_of(dense, tmp_path / "model", [{CONV: MLX_CONV}, dense.converted()])
    assert same_parameters(load_head(folder, dense.trunk), expected_head(dense, tmp_path))


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_vllm_mlx_declares_its_norms_in_a_manifest(tmp_path: Path, family: str) -> None:
    tiny = tiny_head(family)
    folder = folder_of(tiny, tmp_path / "model", [{CONV: MLX_CONV}])
    write(folder / "mtp" / "weights.safetensors", fused(tiny))
    manifest = {"artifact_schema_version": 1, "rmsnorm_weight_format": "mlx_gamma"}
    (folder / "mtp" / "manifest.json").write_text(json.dumps(manifest))
    assert same_parameters(load_head(folder, tiny.trunk), expected_head(tiny, tmp_path))
    # A manifest that stays behind when another file replaces the head's says nothing about that file.
    write(folder / "mtp" / "weights.safetensors", tiny.published(), {"format": "pt"})
    assert same_parameters(load_head(folder, tiny.trunk), expected_head(tiny, tmp_path))


@pytest.mark.parametrize("is_inside", [False, True])
def test_mtplx_declares_zero_centred_norms_in_the_config(
    tmp_path: Path, dense: TinyHead, is_inside: bool, exact: None
) -> None:
    stored = packed(dense.published(), lambda name: (8, 32))
    entry = {"bits": 8, "group_size": 32, "norm_encoding": "delta"}
    named = {"mlx_lm_extra_tensors": {"mtp_file": "mtp.safetensors"}}
    folder = with_config(
        tmp_path / "model", dense, mtplx_mtp_quantization=entry, **({} if is_inside else named)
    )
    if is_inside:
        write(folder / "model.safetensors", stored | {CONV: MLX_CONV}, {"format": "mlx"})
    else:
        write(folder / "mtp.safetensors", stored, {"format": "mlx"})
    norms = [
        dict(tree_flatten(head.layers[0].parameters()))["pre_fc_norm_hidden.weight"]
        for head in (load_head(folder, dense.trunk), expected_head(dense, tmp_path))
    ]
    assert mx.allclose(*norms)


# -- fused experts, quantised ----------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 8])
def test_fused_experts_stay_quantised_and_norms_get_no_second_1(
    tmp_path: Path, moe: TinyHead, exact: None, bits: int
) -> None:
    folder = folder_of(moe, tmp_path / "model", [{CONV: MLX_CONV}])
    write(folder / "mtp" / "weights.safetensors", packed(fused(moe), lambda name: (bits, 32)))
    head = load_head(folder, moe.trunk)
    stacked = load_head(
        write(tmp_path / "b.safetensors", packed(moe.converted(), lambda name: (bits, 32))), moe.trunk
    )
    assert same_parameters(head, stacked)
    experts = {path: layer for path, layer in head.layers[0].named_modules() if "switch_mlp." in path}
    assert {layer.bits for layer in experts.values() if hasattr(layer, "bits")} == {bits}
    assert sum(hasattr(layer, "bits") for layer in experts.values()) == 3
