"""Folders of adapters that cannot be used: each gets an error that names the file and the reason."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from adapter_files import save_adapter
from outrider.models.adapters.files import AdapterError, read_adapter

CONFIG = {"fine_tune_type": "lora", "num_layers": 1, "lora_parameters": {"rank": 2, "scale": 3.0}}
PATH = "model.layers.0.self_attn.q_proj"


def good(folder: Path, scale: float = 3.0) -> Path:
    config = {**CONFIG, "lora_parameters": {"rank": 2, "scale": scale}}
    save_adapter(folder, config, {f"{PATH}.lora_a": mx.ones((8, 2)), f"{PATH}.lora_b": mx.ones((2, 8))})
    return folder


def test_a_good_folder_is_read(tmp_path: Path) -> None:
    files = read_adapter(good(tmp_path))
    assert (files.kind, files.rank, files.scale) == ("lora", 2, 3.0)
    assert files.layers == [PATH]
    assert files.shapes[f"{PATH}.lora_a"] == (8, 2)


def test_the_fingerprint_is_that_of_the_contents(tmp_path: Path) -> None:
    one, same, other = (good(tmp_path / name, scale) for name, scale in (("a", 3.0), ("b", 3.0), ("c", 2.0)))
    assert read_adapter(one).fingerprint == read_adapter(same).fingerprint
    assert read_adapter(one).fingerprint != read_adapter(other).fingerprint


def with_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "adapter_config.json").write_text(json.dumps(CONFIG | changes))

    return change


def with_parameters(**parameters: Any) -> Callable[[Path], None]:
    return with_config(lora_parameters=parameters)


def with_tensors(**arrays: mx.array) -> Callable[[Path], None]:
    return lambda folder: save_adapter(folder, CONFIG, {f"{PATH}.{name}": x for name, x in arrays.items()})


def with_bytes(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes())) and None


def a_pipe(folder: Path) -> None:
    (folder / "adapters.safetensors").unlink()
    os.mkfifo(folder / "adapters.safetensors")


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda folder: (folder / "adapter_config.json").unlink(), "adapter_config.json is missing"),
    "no tensors": (lambda folder: (folder / "adapters.safetensors").unlink(), "safetensors is missing"),
    "no JSON": (lambda folder: (folder / "adapter_config.json").write_text("{"), "not valid JSON"),
    "a list": (lambda folder: (folder / "adapter_config.json").write_text("[]"), "JSON object"),
    "peft": (with_config(peft_type="LORA"), "peft"),
    "whole weights": (with_config(fine_tune_type="full"), "full"),
    "another kind": (with_config(fine_tune_type="loha"), "loha"),
    "no parameters": (with_config(lora_parameters=None), "lora_parameters"),
    "rank 0": (with_parameters(rank=0, scale=1.0), "rank"),
    "a huge rank": (with_parameters(rank=10**9, scale=1.0), "rank"),
    "a rank of text": (with_parameters(rank="8", scale=1.0), "rank"),
    "another rank": (with_parameters(rank=4, scale=1.0), "the rank is 4"),
    "alpha": (with_parameters(rank=2, alpha=16), "alpha"),
    "no scale": (with_parameters(rank=2), "scale"),
    "an infinite scale": (with_parameters(rank=2, scale=float("inf")), "scale"),
    "half a pair": (with_tensors(lora_a=mx.ones((8, 2))), "lora_b"),
    "no pair": (with_tensors(weight=mx.ones((8, 2))), "no tensor of a lora adapter"),
    "integers": (with_tensors(lora_a=mx.ones((8, 2), mx.int32), lora_b=mx.ones((2, 8))), "type"),
    "cut short": (with_bytes("adapters.safetensors", lambda data: data[:-4]), "cut short"),
    "cut in the header": (with_bytes("adapters.safetensors", lambda data: data[:40]), "damaged"),
    "empty": (with_bytes("adapters.safetensors", lambda data: b""), "damaged"),
    "another header": (
        with_bytes("adapters.safetensors", lambda data: data.replace(b"data_offsets", b"data_offsetz")),
        "damaged",
    ),
    "a pipe": (a_pipe, "not a regular file"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_folder_is_refused(name: str, tmp_path: Path) -> None:
    change, reason = BAD[name]
    change(good(tmp_path))
    with pytest.raises(AdapterError, match=reason):
        read_adapter(tmp_path)


def test_a_missing_folder_and_a_large_file_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path / ("x" * 300), "~nobody-at-all/x", "a\0b"):
        with pytest.raises(AdapterError, match="no such folder"):
            read_adapter(path)
    with pytest.raises(AdapterError, match="--adapter-memory"):
        read_adapter(good(tmp_path), max_bytes=100)
