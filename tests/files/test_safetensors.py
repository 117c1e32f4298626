"""The header of a safetensors file: read within bounds, and written as others read it."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from outrider.files.safetensors import (
    InvalidSafetensors,
    SafetensorsHeader,
    TensorEntry,
    lay_out,
    read_header,
)

ARRAYS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.arange(3, dtype=np.float16)}


def read(path: Path, **options: int) -> SafetensorsHeader:
    with open(path, "rb") as file:
        header = read_header(file, **options)
        assert file.tell() == header.data_begin
        return header


def test_a_file_of_the_safetensors_package_is_read(tmp_path: Path) -> None:
    save_file(ARRAYS, tmp_path / "x", metadata={"format": "pt"})
    header = read(tmp_path / "x")
    assert header.metadata == {"format": "pt"}
    data = (tmp_path / "x").read_bytes()[header.data_begin :]
    for name, array in ARRAYS.items():
        info = header.tensors[name]
        assert (info.dtype, info.shape) == ({"a": "F32", "b": "F16"}[name], array.shape)
        assert data[info.begin : info.end] == array.tobytes()


def test_a_written_file_is_read_by_the_safetensors_package(tmp_path: Path) -> None:
    dtypes = {"a": "F32", "b": "F16"}
    tensors = lay_out((name, dtypes[name], array.shape, array.nbytes) for name, array in ARRAYS.items())
    header = SafetensorsHeader(tensors, {"k": "v"})
    (tmp_path / "x").write_bytes(header.encode() + b"".join(array.tobytes() for array in ARRAYS.values()))
    loaded = load_file(tmp_path / "x")
    assert all(np.array_equal(loaded[name], array) for name, array in ARRAYS.items())
    assert read(tmp_path / "x").tensors == header.tensors
    assert read(tmp_path / "x").data_begin % 8 == 0


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    save_file(ARRAYS, tmp_path / "x")
    whole = (tmp_path / "x").read_bytes()
    for length in range(len(whole)):
        (tmp_path / "x").write_bytes(whole[:length])
        with pytest.raises(InvalidSafetensors):
            read(tmp_path / "x")


def test_a_header_beyond_the_limit_is_not_read(tmp_path: Path) -> None:
    save_file(ARRAYS, tmp_path / "x")
    with pytest.raises(InvalidSafetensors, match="the header would have"):
        read(tmp_path / "x", max_bytes=16)
    (tmp_path / "x").write_bytes(b"\xff" * 100)
    with pytest.raises(InvalidSafetensors, match="the header would have"):
        read(tmp_path / "x")


@pytest.mark.parametrize(
    "text",
    [
        "[]", "null", "3", "{", "{" * 5000, "[" * 100_000, '{"__metadata__": 3}', '{"a": 3}', '{"a": {}}',
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}',
        '{"a": {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}',
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}',
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 1e400]}}',
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 99]}}',
    ],
)  # fmt: skip
def test_a_header_that_is_nonsense_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text.encode() + bytes(8))
    with pytest.raises(InvalidSafetensors):
        read(tmp_path / "x")


def test_an_entry_survives_as_json() -> None:
    header = SafetensorsHeader({"a": TensorEntry("BF16", (2, 3), 8, 20)}, {"k": "v"})
    assert json.loads(header.encode()[8:]) == header.as_json()
    assert header.as_json()["a"] == {"dtype": "BF16", "shape": [2, 3], "data_offsets": [8, 20]}
