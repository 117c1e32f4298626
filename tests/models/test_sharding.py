"""A rank's part of a model: the layers that the whole model gets (models/layer_swaps.py), in less memory.

Models that cannot be divided are refused.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

from absent_ranks import AbsentRanks
from outrider.models import loader, machine, merged_linear
from outrider.models.dtypes import settle_dtype
from outrider.models.families import UnsupportedModel
from outrider.models.sharding import shard
from outrider.models.trunk import Trunk
from outrider.models.vision import families as vision_families
from outrider.rank_sums import SummedLinear
from tiny_models import is_quantized_name, quantized_tiny_model, tiny_model, write_checkpoint

SIZES: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


def served(name: str, is_divided: bool) -> nn.Module:
    """Divided among one rank: the layers' classes are those of several."""
    model = quantized_tiny_model(name, **SIZES)[0] if is_quantized_name(name) else tiny_model(name, **SIZES)
    if is_divided:
        shard(model, mx.distributed.init(), name.partition("-")[0])
    settle_dtype(model, "auto")
    trunk = Trunk(model, max_context=64)
    trunk.prepare_for_serving()
    return trunk.model


def kinds(model: nn.Module) -> dict[str, tuple[str, list[str]]]:
    """The class of each layer and those that its class was made from, by path. Sums over ranks left out."""
    found = {}
    for path, layer in model.named_modules():
        if type(layer) is not SummedLinear:
            made_from = [kind.__name__ for kind in type(layer).__mro__ if kind.__name__ != "_SummedOutput"]
            found[path.replace("_proj.linear", "_proj")] = type(layer).__name__, sorted({*made_from})
    return found


@pytest.mark.parametrize("name", ["llama", "llama-4bit", "qwen3_moe", "qwen3_moe-4bit", "qwen3_5-4bit"])
def test_a_part_has_the_layers_of_the_whole(name: str) -> None:
    whole, part = served(name, is_divided=False), served(name, is_divided=True)
    assert any(type(layer) is SummedLinear for _, layer in part.named_modules())
    assert kinds(part) == kinds(whole)


@pytest.mark.parametrize("name", ["llama-4bit", "llama-mxfp4", "llama-mxfp8", "llama-nvfp4"])
def test_a_part_of_a_quantised_model_has_the_arrays_of_its_format(name: str) -> None:
    whole, part = served(name, is_divided=False), served(name, is_divided=True)
    assert len(tree_flatten(part.parameters())) == len(tree_flatten(whole.parameters()))
    token_ids = mx.array([[3, 5, 7]])
    assert mx.array_equal(part(token_ids), whole(token_ids))  # this rank has all heads


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_where_the_device_outruns_the_host_parts_are_merged(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "outruns_host", lambda: True)
    whole, part = served(name, is_divided=False), served(name, is_divided=True)
    merged = [path for path, (kind, _) in kinds(part).items() if kind == "MergedLinearPart"]
    assert len(merged) > 4 * len(part.layers)
    assert kinds(part) == kinds(whole)
    assert merged_linear.plain_class(type(part.layers[0].mlp.gate_proj)) is nn.Linear


# -- memory ----------------------------------------------------------------------------------------------


def load_part(folder: Path, rank: int, num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Bytes that a rank holds after it has loaded its part, and at most while it loads."""
    monkeypatch.setattr(loader, "_new_trunk", lambda network, *_: network)  # it would need the other ranks
    monkeypatch.setattr(loader, "READ_BYTES", 1 << 20)
    gc.collect()
    mx.clear_cache()
    mx.reset_peak_memory()
    before, group = mx.get_active_memory(), AbsentRanks(rank, num_ranks)
    loaded = loader.load(folder, group=group)  # type: ignore[arg-type]
    held, peak = mx.get_active_memory() - before, mx.get_peak_memory() - before
    assert loaded.trunk is not None  # it lives until here
    return held, peak


@pytest.mark.parametrize("name", ["llama", "llama-4bit"])
def test_a_rank_never_holds_the_whole_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 256, "num_hidden_layers": 12, "intermediate_size": 1024, "vocab_size": 1024}
    write_checkpoint(tmp_path, name, **SIZES | {"num_key_value_heads": 4} | sizes)
    whole = (tmp_path / "model.safetensors").stat().st_size
    for rank in (0, 3):
        held, peak = load_part(tmp_path, rank, 4, monkeypatch)
        assert held < 0.4 * whole  # a quarter, and the embeddings; rank 0 has the output projection too
        assert peak < 0.5 * whole


def test_a_weight_file_that_is_cut_short_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", **SIZES)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(loader.ModelLoadError, match=r"model\.safetensors"):
        loader.load(tmp_path, group=AbsentRanks(1, 2))  # type: ignore[arg-type]


# -- models that cannot be divided -----------------------------------------------------------------------


def refusal(family: str, num_ranks: int, **changes: Any) -> str:
    with pytest.raises(UnsupportedModel) as refused:
        shard(tiny_model(family, **changes), AbsentRanks(1, num_ranks), family)  # type: ignore[arg-type]
    return str(refused.value)


def test_a_family_that_mlx_lm_cannot_divide_is_refused() -> None:
    assert "mlx-lm has no tensor parallelism for it: serve it on one machine" in refusal("phi3", 2)


def test_ranks_that_do_not_divide_the_heads_are_refused() -> None:
    assert "3 ranks do not divide it evenly (" in refusal("llama", 3)


@pytest.mark.parametrize("family", ["longcat_flash", "minimax"])
def test_sums_whose_order_would_depend_on_other_rows_are_refused(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx.distributed, "Group", AbsentRanks)  # by which layers with sums are found
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 3, "expert_ffn_hidden_size": 96}
    assert "depend on the other rows: use 2 ranks" in refusal(family, 3, **sizes)
    shard(tiny_model(family), AbsentRanks(1, 2), family)  # type: ignore[arg-type]


def test_images_on_several_ranks_are_embeddings_and_positions_only() -> None:
    """Other ranks get no image features of deeper layers (Qwen3-VL) and no spans of images (Gemma)."""

    def can_be_divided(name: str) -> bool:
        family = vision_families.SUPPORTED[name]
        kind, _ = _get_classes({"model_type": family.text if family.images == "tiles" else name})
        return hasattr(kind, "shard")

    divided = {name for name in vision_families.SUPPORTED if can_be_divided(name)}
    assert divided == {"idefics3", "smolvlm", "qwen3_5", "qwen3_5_moe"}
