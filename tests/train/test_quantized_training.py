"""`outrider mtp train --bits`: the head is trained in float32, and written and measured quantised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from outrider.cli.main import main
from outrider.models import dtypes, heads, loader
from outrider.train import run
from outrider.train.errors import TrainingError
from outrider.train.evaluate import Acceptance, evaluate
from outrider.train.head_file import quantized_weights, served_head, stored_weights
from outrider.train.run_folder import RunFolder, RunRecord
from outrider.train.settings import TrainingSettings
from tiny_models import write_checkpoint

OPTIONS = {"--conversations": 20, "--steps": 2, "--batch-tokens": 64, "--max-tokens": 40, "--depths": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "tiny-qwen3"
    write_checkpoint(folder, "qwen3", num_hidden_layers=1)
    return folder


def test_a_trained_head_is_written_and_measured_quantised(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dtypes, "keeps_quantized", lambda dtype: True)
    measured: list[heads.MTPHead] = []

    def spy(head: heads.MTPHead, *rest: Any) -> Acceptance:
        measured.append(head)
        return evaluate(head, *rest)

    monkeypatch.setattr(run, "evaluate", spy)
    out = tmp_path / "head.safetensors"
    words = [str(word) for option in OPTIONS.items() for word in option]
    command = ["mtp", "train", str(folder), "--out", str(out), "--bits", "5", "--group-size", "32"]
    assert main([*command, *words]) == 0
    assert "Quantised to 5 bits in groups of 32: 0." in capsys.readouterr().out

    loaded: Any = mx.load(str(out), return_metadata=True)
    tensors, metadata = loaded
    assert json.loads(metadata["head_quantization"]) == {"bits": 5, "group_size": 32, "mode": "affine"}
    assert json.loads(metadata["settings"])["bits"] == 5
    assert tensors["mtp.fc.weight"].dtype == mx.uint32
    assert tensors["mtp.fc.scales"].dtype == mx.float16
    assert tensors["mtp.norm.weight"].dtype == mx.float16

    assert measured
    (layer,) = heads.load_head(out, loader.load(folder).trunk).layers
    assert (layer.fc.bits, layer.fc.group_size) == (5, 32)
    written: dict[str, mx.array] = dict(tree_flatten(layer.parameters()))
    for head in measured:
        for name, array in tree_flatten(head.parameters()):
            np.testing.assert_array_equal(np.array(array), np.array(written[name]), err_msg=name)


def test_where_quantised_layers_are_not_kept_the_served_head_is_dequantised(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dtypes, "keeps_quantized", lambda dtype: False)
    trunk = loader.load(folder).trunk
    plain = stored_weights(heads.new_head(trunk).parameters())
    weights, layers = quantized_weights(plain, heads.Quantization(8, 32), trunk)
    assert layers.left == ()
    head = served_head(weights, trunk)
    assert head.fc.weight.dtype == mx.float32
    difference = mx.abs(head.fc.weight - plain["fc"]["weight"].astype(mx.float32)).max().item()
    assert 0 < difference < 0.01


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bits": 3}, "--bits must be one of 4, 5, 6, 8, not 3"),
        ({"bits": 4, "group_size": 16}, "--group-size must be one of 32, 64, 128, not 16"),
        ({"group_size": 64}, "--group-size needs --bits"),
    ],
)
def test_formats_that_are_not_known(given: dict[str, int], message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        TrainingSettings(**given)  # type: ignore[arg-type]


def test_a_group_size_that_fits_no_layer_is_refused_before_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(tmp_path, "qwen3", num_hidden_layers=1, hidden_size=32, intermediate_size=48, head_dim=8)
    assert main(["mtp", "train", str(tmp_path), "--bits", "4", "--group-size", "128"]) == 2
    assert "Choose a smaller --group-size" in capsys.readouterr().err
    assert not RunFolder(tmp_path / "mtp" / "weights.safetensors").is_begun


def test_a_run_that_was_begun_without_such_options_can_be_resumed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "weights.safetensors")
    record = RunRecord({"trunk": "tiny"}, TrainingSettings(seed=3), [])
    with folder.locked():
        folder.begin(record)
    file = folder.folder / "run.json"
    stored = json.loads(file.read_text())
    del stored["settings"]["bits"], stored["settings"]["group_size"]
    file.write_text(json.dumps(stored))
    assert folder.record() == record


def test_a_quantised_model_gets_a_head(tmp_path: Path) -> None:
    """Its native operations have no gradients: the head learns from the same weights in float32."""
    folder, out = tmp_path / "tiny-llama", tmp_path / "head.safetensors"
    write_checkpoint(folder, "llama-4bit", num_hidden_layers=1)
    words = [str(word) for option in OPTIONS.items() for word in option]
    assert main(["mtp", "train", str(folder), "--out", str(out), *words]) == 0
    assert heads.load_head(out, loader.load(folder).trunk).layers
