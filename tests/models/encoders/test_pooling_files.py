"""What a model folder says about pooling, and the errors of folders that are incomplete or damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from outrider.models.encoders.loading import kind_in, load_pooling_model
from outrider.models.encoders.pooling_files import PoolingSpec, pooling_spec
from outrider.models.errors import ModelUnavailable
from tiny_encoders import write_encoder


def change(folder: Path, file: str, **changes: Any) -> None:
    config = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(config | changes))


def change_tensor(folder: Path, name: str, change: Callable[[np.ndarray], np.ndarray | None]) -> None:
    file = str(folder / "model.safetensors")
    weights: Any = mx.load(file)
    mx.eval(weights)
    changed = change(np.array(weights.pop(name)))
    if changed is not None:
        weights[name] = mx.array(changed)
    mx.save_safetensors(file, weights)


def with_nan(array: np.ndarray) -> np.ndarray:
    array.flat[3] = np.nan
    return array


WORDS = "embeddings.word_embeddings.weight"
EXPAND = "encoder.layer.1.intermediate.dense.weight"
MODULES = [{"type": f"sentence_transformers.models.{kind}"} for kind in ("Transformer", "Pooling", "Dense")]

Change = Callable[[Path], object]
BROKEN: dict[str, tuple[Change, str]] = {
    "no modules.json": (
        lambda f: (f / "modules.json").unlink(),
        "encoder without modules.json.*publisher's whole folder",
    ),
    "no pooling config": (
        lambda f: (f / "1_Pooling" / "config.json").unlink(),
        "1_Pooling/config.json is missing: it says how",
    ),
    "modules that are no JSON": (
        lambda f: (f / "modules.json").write_text("["),
        "modules.json cannot be read",
    ),
    "modules that are no list": (lambda f: (f / "modules.json").write_text("{}"), "not a list of modules"),
    "another module": (
        lambda f: (f / "modules.json").write_text(json.dumps(MODULES)),
        "a module 'Dense', which is not supported",
    ),
    "no pooling module": (
        lambda f: (f / "modules.json").write_text(json.dumps(MODULES[:1])),
        "must have one Pooling module, and has 0",
    ),
    "two pooling modes": (
        lambda f: change(f, "1_Pooling/config.json", pooling_mode_cls_token=True),
        "must be one of .*, and the file has cls, mean",
    ),
    "no pooling mode": (
        lambda f: change(f, "1_Pooling/config.json", pooling_mode_mean_tokens=False),
        "and the file has none",
    ),
    "an unknown pooling mode": (
        lambda f: change(f, "1_Pooling/config.json", pooling_mode="attention"),
        "and the file has attention",
    ),
    "prompts that are not pooled": (
        lambda f: change(f, "1_Pooling/config.json", include_prompt=False),
        "include_prompt false is not supported",
    ),
    "a length of no tokens": (
        lambda f: (f / "sentence_bert_config.json").write_text('{"max_seq_length": 0}'),
        "max_seq_length must be a number of tokens, not 0",
    ),
    "another family": (
        lambda f: change(f, "config.json", model_type="modernbert"),
        "'modernbert' is not supported. Supported: bert, ",
    ),
    "an incomplete config": (
        lambda f: (f / "config.json").write_text('{"model_type": "bert"}'),
        "incomplete: KeyError.'vocab_size'",
    ),
    "relative positions": (
        lambda f: change(f, "config.json", position_embedding_type="relative_key"),
        "position_embedding_type 'relative_key' is not supported",
    ),
    "another activation": (
        lambda f: change(f, "config.json", hidden_act="mish"),
        "the activation 'mish' is not supported",
    ),
    "heads that do not divide the size": (
        lambda f: change(f, "config.json", num_attention_heads=5),
        "hidden_size 32 is no multiple of 5 heads",
    ),
    "a size of 0": (lambda f: change(f, "config.json", num_hidden_layers=0), "a size below 1"),
    "NaN in a tensor": (
        lambda f: change_tensor(f, EXPAND, with_nan),
        f"'{EXPAND}' has values that are no numbers .*damaged",
    ),
    "a missing tensor": (
        lambda f: change_tensor(f, EXPAND, lambda array: None),
        "no weights for 'layers.1.expand.weight': the files are incomplete",
    ),
    "a tensor of another shape": (
        lambda f: change_tensor(f, WORDS, lambda array: array[:-1]),
        r"has the shape \(59, 32\), and config.json asks for \(60, 32\)",
    ),
    "integers": (
        lambda f: change_tensor(f, WORDS, lambda array: array.astype(np.int32)),
        "is of type mlx.core.int32",
    ),
    "a quantised model": (
        lambda f: change(f, "config.json", quantization={"group_size": 64, "bits": 4}),
        "quantised encoder, which is not supported",
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "has no weights .*pytorch_model.bin"),
    "truncated weights": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-100]),
        "model.safetensors cannot be read",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_folder_that_cannot_be_used_is_refused_with_the_reason(tmp_path: Path, case: str) -> None:
    change_folder, message = BROKEN[case]
    folder = write_encoder(tmp_path / "model")
    change_folder(folder)
    with pytest.raises(ModelUnavailable, match=message):
        load_pooling_model(folder, "bert")


def test_a_classifier_with_several_labels_is_no_reranker(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "model", is_reranker=True)
    change(folder, "config.json", id2label={"0": "a", "1": "b"})
    with pytest.raises(ModelUnavailable, match="classifies texts into 2 labels"):
        load_pooling_model(folder, "bert")


def test_a_causal_reranker_is_refused_by_name(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "model", is_reranker=True)
    change(folder, "config.json", model_type="qwen3")
    with pytest.raises(ModelUnavailable, match="'qwen3' models with a classification head cannot be used"):
        load_pooling_model(folder, "bert")


def test_what_the_files_say(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "one", pooling="cls", max_seq_length=9)
    assert pooling_spec(folder) == PoolingSpec("cls", True, 9)
    assert pooling_spec(write_encoder(tmp_path / "two", normalises=False)) == PoolingSpec("mean", False)


def test_the_pooling_mode_as_later_versions_write_it(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "model")
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "lasttoken"}')
    assert pooling_spec(folder).mode == "lasttoken"


def test_the_kind_of_a_folder(tmp_path: Path) -> None:
    assert kind_in(write_encoder(tmp_path / "one")) == "embedding"
    assert kind_in(write_encoder(tmp_path / "two", is_reranker=True)) == "reranker"
    assert kind_in(tmp_path / "nothing") is None
