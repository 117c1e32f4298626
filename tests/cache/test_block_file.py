"""A block's file: what comes back is what was written, or nothing at all."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from cache.host_blocks import block, is_same
from outrider.cache import block_file
from outrider.cache.block_file import BadFile, check_finite, read_block_file, write_block_file
from outrider.host_array import HostArray

KEY = b"k" * 32
LABELS = {"fingerprint": "abc", "name": "def"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "one.safetensors"
    assert write_block_file(path, LABELS, block(1), KEY) == path.stat().st_size
    return path


def test_a_file_gives_back_what_was_written(path: Path) -> None:
    assert is_same(read_block_file(path, LABELS, KEY), block(1))


def test_it_is_a_safetensors_file_that_others_can_read(path: Path) -> None:
    with safe_open(path, "numpy") as file:
        assert file.metadata()["fingerprint"] == "abc"
        assert np.array_equal(file.get_tensor("0"), block(1)["0"].data)


@pytest.mark.parametrize("label", list(LABELS))
def test_a_foreign_file_is_refused(path: Path, label: str) -> None:
    with pytest.raises(BadFile, match=f"another {label}"):
        read_block_file(path, LABELS | {label: "other"}, KEY)


def test_a_file_of_another_version_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_file, "VERSION", 3)
    with pytest.raises(BadFile, match="version 2"):
        read_block_file(path, LABELS, KEY)


def test_a_file_that_somebody_else_wrote_is_refused(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"0": np.zeros(3, np.float32)}, tmp_path / "x", metadata=LABELS)
    with pytest.raises(BadFile, match="not written by"):
        read_block_file(tmp_path / "x", LABELS, KEY)


def test_a_file_cut_anywhere_is_refused(path: Path) -> None:
    whole = path.read_bytes()
    for length in {0, 1, 7, 8, 9, 100, len(whole) - 1, *random.Random(0).sample(range(len(whole)), 50)}:
        path.write_bytes(whole[:length])
        with pytest.raises(BadFile):
            read_block_file(path, LABELS, KEY)
    path.write_bytes(whole + b"x")
    with pytest.raises(BadFile):
        read_block_file(path, LABELS, KEY)


def test_a_flipped_bit_anywhere_is_noticed(path: Path) -> None:
    whole = path.read_bytes()
    rng = random.Random(0)
    header_end = 8 + int.from_bytes(whole[:8], "little")
    places = [*range(header_end), *rng.sample(range(header_end, len(whole)), 50)]
    for place in places:
        broken = bytearray(whole)
        broken[place] ^= 1 << rng.randrange(8)
        path.write_bytes(broken)
        try:
            found = read_block_file(path, LABELS, KEY)
        except BadFile:
            continue
        assert is_same(found, block(1)), f"byte {place}"  # white space behind the header


@pytest.mark.parametrize(
    "text", ["[]", "null", "{}", '{"__metadata__": 3}', "{" * 5000, '{"__metadata__": {}}']
)
def test_a_header_that_is_nonsense_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x"
    path.write_bytes(len(text).to_bytes(8, "little") + text.encode())
    with pytest.raises(BadFile):
        read_block_file(path, LABELS, KEY)


def test_a_header_with_a_good_checksum_and_bad_places_is_refused(path: Path) -> None:
    whole = path.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:end])
    header["0"]["data_offsets"] = [0, 10**9]
    del header["__metadata__"]["checksum"]
    header["__metadata__"]["checksum"] = block_file._checksum(KEY, header, [memoryview(whole[end:])])
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + whole[end:])
    with pytest.raises(BadFile):
        read_block_file(path, LABELS, KEY)


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_block_file(tmp_path / "x", LABELS, block(1), KEY)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_never_written(value: float) -> None:
    check_finite(block(1))
    for dtype, bits in (("F32", np.float32), ("F16", np.float16)):
        data = np.zeros((2, 3), bits)
        data[1, 2] = value
        with pytest.raises(BadFile, match="NaN"):
            check_finite({"0": HostArray(dtype, data)})
    as_bfloat16 = (np.array([1.0, value], np.float32).view(np.uint32) >> 16).astype(np.uint16)
    with pytest.raises(BadFile, match="NaN"):
        check_finite({"0": HostArray("BF16", as_bfloat16)})


def test_a_file_that_was_written_with_another_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "planted.safetensors"
    write_block_file(path, LABELS, block(1), b"another key" * 3)
    with pytest.raises(BadFile, match="checksum"):
        read_block_file(path, LABELS, KEY)


def test_a_symbolic_link_is_not_followed(path: Path) -> None:
    link = path.with_name("link")
    link.symlink_to(path)
    with pytest.raises(OSError, match="symbolic link"):
        read_block_file(link, LABELS, KEY)


def test_only_the_owner_can_read_a_file(path: Path) -> None:
    assert path.stat().st_mode & 0o777 == 0o600
