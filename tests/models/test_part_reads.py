"""A rank that reads its rows of the files has the same bits as one that divides whole tensors."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from absent_ranks import AbsentRanks
from outrider.files.safetensors import InvalidSafetensors
from outrider.models import loader, part_reads
from outrider.models.families import SUPPORTED, UnsupportedModel
from outrider.models.part_reads import RowNumbers, stored_tensors
from outrider.models.sharding import shard
from tiny_models import LANGUAGE_MODELS, write_checkpoint

SIZES: dict[str, Any] = {  # that two and three ranks divide, into groups of 32 where weights are quantised
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "intermediate_size": 192,
    "moe_intermediate_size": 192,
    "linear_num_key_heads": 6,
    "linear_num_value_heads": 12,
}
WEIGHTS = "model.safetensors"


def whole_tensors(folder: Path, group: Any) -> nn.Module:
    config = loader.read_config(folder)
    network, _ = loader._load_network(folder, config, None)
    shard(network, group, config["model_type"])
    return network


def own_rows(folder: Path, group: Any) -> tuple[nn.Module, int]:
    """The network, and the bytes that were read as rows."""
    config, stored = loader.read_config(folder), dict[str, mx.array]()
    network, _ = loader._load_network(folder, config, None, stored=stored)
    numbers = RowNumbers(network, stored_tensors(folder, stored), group.size())
    shard(network, group, config["model_type"])
    numbers.read(network)
    return network, numbers.num_bytes_read


def arrays(network: nn.Module) -> dict[str, mx.array]:
    return dict(tree_flatten(network.parameters()))


def check_same(folder: Path, group: Any) -> int:
    wanted, (network, num_bytes) = arrays(whole_tensors(folder, group)), own_rows(folder, group)
    found = arrays(network)
    assert found.keys() == wanted.keys()
    for path, array in wanted.items():
        assert found[path].dtype == array.dtype, path
        assert found[path].shape == array.shape, path
        assert mx.array_equal(found[path].view(mx.uint8), array.view(mx.uint8)), path
    return num_bytes


def rewrite(folder: Path, change: Any) -> None:
    """The checkpoint with `change(name, array)` -> [(name, array), ...] for each tensor."""
    stored = mx.load(str(folder / WEIGHTS))
    mx.eval(stored)
    changed = dict(pair for name, array in stored.items() for pair in change(name, array))
    mx.save_safetensors(str(folder / WEIGHTS), changed, {"format": "mlx"})


def as_bfloat16(name: str, array: mx.array) -> list[tuple[str, mx.array]]:
    is_float = mx.issubdtype(array.dtype, mx.floating)
    return [(name, array.astype(mx.bfloat16) if is_float else array)]


def as_published(name: str, array: mx.array) -> list[tuple[str, mx.array]]:
    """Each expert in a tensor of its own."""
    before, _, part = name.partition("switch_mlp.")
    if not part:
        return [(name, array)]
    return [(f"{before}experts.{number}.{part}", expert) for number, expert in enumerate(array)]


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(
    "name", ["llama", "llama-4bit", "qwen3_moe", "qwen3_moe-4bit", "qwen3_5", "qwen3_5-4bit", "qwen3-mxfp4"]
)
def test_a_rank_has_the_bits_of_its_part(
    name: str, num_ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, name, **SIZES)
    for _ in range(2):
        for rank in range(num_ranks):
            by_rows = check_same(tmp_path, AbsentRanks(rank, num_ranks))
            assert by_rows > 0
            with monkeypatch.context() as patch:
                patch.setattr(part_reads, "MIN_RUN_BYTES", 1)
                assert check_same(tmp_path, AbsentRanks(rank, num_ranks)) > by_rows
        rewrite(tmp_path, as_bfloat16)


DIVIDED = sorted(
    family
    for family in SUPPORTED - set(LANGUAGE_MODELS)
    if hasattr(importlib.import_module(f"mlx_lm.models.{family}").Model, "shard")
)


@pytest.mark.parametrize("family", DIVIDED)
def test_every_family_is_divided_in_its_own_way(family: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family)
    refused = refusal(whole_tensors, tmp_path)
    assert refusal(own_rows, tmp_path) == refused
    assert refused or check_same(tmp_path, AbsentRanks(1, 2)) > 0


def refusal(divide: Callable[[Path, Any], object], folder: Path) -> str | None:
    try:
        divide(folder, AbsentRanks(1, 2))
    except UnsupportedModel as error:
        return str(error)
    return None


def test_fewer_heads_than_ranks_are_copied(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3_5", **SIZES | {"num_key_value_heads": 1})
    check_same(tmp_path, AbsentRanks(2, 3))


def test_tensors_that_are_joined_when_they_are_loaded_are_divided_afterwards(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3_moe", **SIZES)
    joined = check_same(tmp_path, AbsentRanks(1, 2))
    rewrite(tmp_path, as_published)
    assert 0 < check_same(tmp_path, AbsentRanks(1, 2)) < joined


# -- what is read ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "llama-4bit"])
def test_a_rank_reads_its_rows_only(name: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, name, **SIZES)
    network, num_bytes = own_rows(tmp_path, AbsentRanks(1, 3))
    by_rows = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")
    parts = {path: array for path, array in arrays(network).items() if path.split(".")[-2] in by_rows}
    assert num_bytes == sum(array.nbytes for array in parts.values())


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_columns_are_read_alone_if_those_of_a_row_fill_some_pages(
    num_ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, "llama", **SIZES | {"intermediate_size": 384})
    row_bytes = 4 * 384  # of a down_proj; an o_proj has shorter rows

    def num_read(min_run_bytes: int) -> tuple[int, int]:
        monkeypatch.setattr(part_reads, "MIN_RUN_BYTES", min_run_bytes)
        network, num_bytes = own_rows(tmp_path, AbsentRanks(1, num_ranks))
        return num_bytes, network.layers[0].mlp.down_proj.linear.weight.nbytes * len(network.layers)

    with_columns, down_bytes = num_read(row_bytes // num_ranks)
    without, _ = num_read(row_bytes // num_ranks + 1)
    assert with_columns == without + down_bytes


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts bytes in /proc")
def test_the_kernel_counts_fewer_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_new_trunk", lambda network, *_: network)  # it would need the other ranks
    write_checkpoint(tmp_path, "llama", **SIZES | {"hidden_size": 384, "intermediate_size": 1536})

    def read_by(rank: int, num_ranks: int) -> int:
        before = int(Path("/proc/self/io").read_text().split()[1])
        loader.load(tmp_path, group=AbsentRanks(rank, num_ranks))  # type: ignore[arg-type]
        return int(Path("/proc/self/io").read_text().split()[1]) - before

    read_by(1, 2)  # imports
    whole = (tmp_path / WEIGHTS).stat().st_size
    # A third is o_proj and down_proj, which are divided by columns, and the embeddings.
    assert read_by(1, 2) < 0.75 * whole
    assert read_by(1, 3) < 0.65 * whole


# -- files -----------------------------------------------------------------------------------------------


def test_a_name_in_two_files_is_left_to_mlx(tmp_path: Path) -> None:
    twice, once = mx.ones((4, 8)), mx.zeros((4, 8))
    mx.save_safetensors(str(tmp_path / "model-1.safetensors"), {"twice": twice, "once": once})
    mx.save_safetensors(str(tmp_path / "model-2.safetensors"), {"twice": once})
    stored = stored_tensors(tmp_path, {"twice": twice, "once": once})
    assert [tensor.array is once for tensor in stored.values()] == [True]


@pytest.mark.parametrize("min_run_bytes", [1, 1 << 30])
def test_a_file_that_becomes_shorter_is_named(
    min_run_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_reads, "MIN_RUN_BYTES", min_run_bytes)
    write_checkpoint(tmp_path, "llama")
    stored: dict[str, mx.array] = {}
    network, _ = loader._load_network(tmp_path, loader.read_config(tmp_path), None, stored=stored)
    numbers = RowNumbers(network, stored_tensors(tmp_path, stored), 2)
    shard(network, AbsentRanks(1, 2), "llama")  # type: ignore[arg-type]
    (tmp_path / WEIGHTS).write_bytes((tmp_path / WEIGHTS).read_bytes()[:20_000])
    with pytest.raises(InvalidSafetensors, match=r"model\.safetensors is cut short"):
        numbers.read(network)


def test_control_weights_that_are_computed_with_are_noticed(tmp_path: Path) -> None:
    layer = nn.Linear(8, 8, bias=False)
    mx.save_safetensors(str(tmp_path / WEIGHTS), {"weight": layer.weight})
    numbers = RowNumbers(layer, stored_tensors(tmp_path, {"weight": layer.weight}), 2)
    layer.weight = layer.weight / 2
    with pytest.raises(AssertionError, match="in another way than to divide them"):
        numbers.read(layer)


def test_a_model_with_weights_like_row_numbers_is_divided_as_it_is(tmp_path: Path) -> None:
    layer = nn.Linear(8, 8, bias=False)
    mx.save_safetensors(str(tmp_path / WEIGHTS), {"weight": layer.weight})
    wanted, layer.table = layer.weight, mx.arange(4, dtype=mx.int64)
    RowNumbers(layer, stored_tensors(tmp_path, {"weight": layer.weight}), 2).read(layer)
    assert layer.weight is wanted


def test_ranks_that_do_not_divide_the_columns_are_refused_as_before(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", **SIZES | {"intermediate_size": 100})
    with pytest.raises(UnsupportedModel, match="3 ranks do not divide it evenly"):
        loader.load(tmp_path, group=AbsentRanks(1, 3))  # type: ignore[arg-type]
