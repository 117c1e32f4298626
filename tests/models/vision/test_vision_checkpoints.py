"""Checkpoints of vision models, as they are published, load as text models, without a copy of any weight."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from outrider.models import loader
from outrider.models.trunk import Trunk
from ragged_rows import error, solo_logits
from tiny_models import COMMON, END_ID, TINY, tiny_model, write_tokenizer

TEXT = list(range(20, 50))
ZERO_CENTRED = ("layernorm.weight", "model.norm.weight", "q_norm.weight", "k_norm.weight")


def published(family: str, model: nn.Module) -> dict[str, mx.array]:
    """The weights under the names, and in the forms, that Hugging Face has."""
    weights = {"model.visual.patch_embed.proj.weight": mx.ones((4, 4))}
    for name, array in tree_flatten(model.parameters()):
        if family.startswith("qwen3_5"):
            if name.endswith(ZERO_CENTRED):
                array = array - 1
            if "conv1d.weight" in name:
                array = array.moveaxis(1, 2)
        name = name.removeprefix("language_model.")
        if name.startswith("model."):
            name = name.replace("model.", "model.language_model.", 1)
        weights[name] = array
    return weights


@pytest.mark.parametrize("family", ["qwen3_5", "qwen2_vl", "qwen3_vl"])
def test_a_published_vision_checkpoint_loads_as_a_text_model(tmp_path: Path, family: str) -> None:
    text = {**COMMON, **TINY[family].get("text_config", TINY[family]), "tie_word_embeddings": False}
    config = {"model_type": family, "eos_token_id": END_ID, "text_config": {"model_type": "a_text", **text}}
    model = tiny_model(family, **config)
    tmp_path.joinpath("config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), published(family, model), {"format": "pt"})
    write_tokenizer(tmp_path)

    loaded = loader.load(tmp_path)

    assert error(solo_logits(loaded.trunk.model, TEXT), solo_logits(model, TEXT)) <= 1e-6
    assert loaded.trunk.max_context == 256


def test_the_trunk_is_the_language_model_itself() -> None:
    model = tiny_model("qwen3_vl")
    assert Trunk(model, max_context=64).model is model.language_model
