"""The float32 copy of a model for other servers: the same names and the same logits."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from benchmarks.float32_copy import write_float32_copy
from mlx.utils import tree_flatten
from mlx_lm import utils

from tiny_models import tiny_model, write_checkpoint

TOKENS = mx.array([[5, 9, 17, 30, 8]])


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])  # the second one has a model within a model
def test_a_copy_has_the_names_and_the_logits_of_the_model(family: str, tmp_path: Path) -> None:
    quantised = write_checkpoint(tmp_path / "quantised", f"{family}-4bit")
    copy = write_float32_copy(tmp_path / "quantised", tmp_path / "copy")
    weights = mx.load(str(copy / "model.safetensors"))
    assert weights.keys() == dict(tree_flatten(tiny_model(family).parameters())).keys()
    assert {array.dtype for array in weights.values()} == {mx.float32}
    copied, _ = utils.load_model(copy)
    assert mx.allclose(copied(TOKENS), quantised(TOKENS), atol=1e-3)
