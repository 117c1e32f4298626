"""A head that is divided among ranks computes what the whole one computes, and each rank has a part of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from absent_ranks import AbsentRanks
from models.heads import divided_heads
from outrider.models.divided_output import GatheredLinear
from outrider.models.heads import HeadNotDivisible, divide
from outrider.models.trunk import Trunk
from outrider.rank_sums import SummedLinear
from rank_processes import run_ranks
from step.histories import random_head
from tiny_models import tiny_model

NOT_DIVISIBLE = {"longcat_flash"}  # the block of its head is not one of the trunk's layers
SIZES: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
}


def arrays(module: nn.Module) -> dict[str, mx.array]:
    return dict(tree_flatten(module.parameters()))


def test_divided_heads_of_all_families_give_the_outputs_of_whole_ones(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    run_ranks(2, Path(divided_heads.__file__), out)
    found = json.loads(out.read_text())
    refused = {family for family, error in found.items() if isinstance(error, str)}
    assert refused == NOT_DIVISIBLE, found
    assert all(0 < error < 1e-5 for family, error in found.items() if family not in refused), found


@pytest.mark.parametrize("bits", [None, 4])
def test_a_rank_has_its_part_of_every_matrix(bits: int | None) -> None:
    trunk = Trunk(tiny_model("llama", **SIZES), max_context=64)
    before = {name: np.array(array) for name, array in arrays(trunk.model).items()}
    parts = []
    for rank in range(2):
        head = random_head(trunk)
        if bits is not None:
            nn.quantize(head, group_size=32, bits=bits)
        whole = arrays(head)
        group: Any = AbsentRanks(rank, 2)
        divide([head], trunk, group)
        parts.append({name.replace(".linear.", "."): array for name, array in arrays(head).items()})
        assert isinstance(head.fc, GatheredLinear)
        assert isinstance(head.layers[0].self_attn.o_proj, SummedLinear)
    for name, array in whole.items():
        if array.ndim == 1:
            assert all(mx.array_equal(part[name], array) for part in parts), name
            continue
        axis = 1 if "o_proj" in name or "down_proj" in name else 0
        assert mx.array_equal(mx.concatenate([part[name] for part in parts], axis), array), name
    assert all(np.array_equal(before[name], array) for name, array in arrays(trunk.model).items())


def test_ranks_that_do_not_divide_the_head_are_told() -> None:
    trunk = Trunk(tiny_model("llama", **SIZES), max_context=64)
    group: Any = AbsentRanks(0, 3)
    with pytest.raises(HeadNotDivisible, match="the MTP head cannot be divided: 3 ranks do not divide"):
        divide([random_head(trunk)], trunk, group)


def test_groups_of_quantised_weights_are_not_cut() -> None:
    trunk = Trunk(tiny_model("llama", **SIZES | {"intermediate_size": 96}), max_context=64)
    head = random_head(trunk)
    nn.quantize(head, group_size=32, bits=4)
    group: Any = AbsentRanks(0, 2)
    with pytest.raises(HeadNotDivisible, match="2 ranks do not divide it evenly"):
        divide([head], trunk, group)
