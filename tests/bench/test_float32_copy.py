"""The float32 copy of a model for other servers: the same names and the same logits."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from benchmarks.float32_copy import write_float32_copy
from mlx.utils import tree_flatten
from mlx_lm import utils

from models.head_checkpoints import TinyHead, packed, tiny_head, write
from outrider.models import loader
from outrider.models.heads import load_head
from tiny_models import save_checkpoint, tiny_model, write_checkpoint

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


def write_with_head_inside(folder: Path, tiny: TinyHead, head: dict[str, mx.array]) -> Path:
    save_checkpoint(folder, tiny.model, tiny.config)
    trunk: dict[str, mx.array] = dict(tree_flatten(tiny.model.parameters()))
    write(folder / "model.safetensors", trunk | head, {"format": "mlx"})
    return folder


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("family", ["qwen3_5", "glm4_moe"])  # the second one's head is a layer after the last
def test_a_copy_has_the_head_that_is_inside_the_checkpoint(
    family: str, bits: int | None, tmp_path: Path
) -> None:
    tiny = tiny_head(family)
    stored = tiny.converted() if bits is None else packed(tiny.converted(), lambda name: (bits, 32))
    model = write_with_head_inside(tmp_path / "model", tiny, stored)
    copy = write_float32_copy(model, tmp_path / "copy")
    heads = []
    for folder in (model, copy):
        loaded = loader.load(folder, "float32")
        head = load_head(folder, loaded.trunk, config=loaded.config, dtype="float32")
        heads.append(dict(tree_flatten(head.layers[0].parameters())))
    assert heads[0].keys() == heads[1].keys()
    assert all(mx.array_equal(heads[0][name], heads[1][name]) for name in heads[0])


def test_a_copy_has_the_head_file_that_the_config_names(tmp_path: Path) -> None:
    tiny = tiny_head("qwen3_5")
    tiny.config["mlx_lm_extra_tensors"] = {"mtp_file": "extra.safetensors"}
    model = write_with_head_inside(tmp_path / "model", tiny, {})
    head = write(model / "extra.safetensors", tiny.converted(), {"format": "mlx"})
    copy = write_float32_copy(model, tmp_path / "copy")
    assert (copy / "extra.safetensors").read_bytes() == head.read_bytes()
