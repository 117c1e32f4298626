import contextlib
import re
import struct

import pytest
from gguf_writer import File, Tensor, TinyModel, plain
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.models.errors import UnreadableGGUF
from outrider.models.gguf.header import read_header


def test_metadata_and_tensors_are_read_back(tmp_path):
    metadata = {
        "general.architecture": "llama",
        "a": 3,
        "b": True,
        "c": "ü",
        "d": ["x", "yz"],
        "e": [1, 2],
        "f": 0.5,
    }
    file = File(metadata, [plain("one", [[1.0, 2.0]]), plain("two", [3.0, 4.0, 5.0], "F16")])
    header = read_header(file.write(tmp_path / "m.gguf"))
    assert header.metadata == metadata
    assert header.architecture == "llama"
    one, two = header.tensors["one"], header.tensors["two"]
    assert (one.shape, one.type_name, one.num_bytes) == ((1, 2), "F32", 8)
    assert (two.shape, two.type_name, two.num_bytes) == ((3,), "F16", 6)
    assert two.position == one.position + 32


@pytest.mark.parametrize("content", [b"", b"GG", b"not a model at all", b"PK\x03\x04" + bytes(100)])
def test_a_file_that_is_no_gguf_is_refused(tmp_path, content):
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(UnreadableGGUF, match=re.escape(str(path))):
        read_header(path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(UnreadableGGUF, match="cannot be opened"):
        read_header(tmp_path / "none.gguf")


@pytest.mark.parametrize("version", [1, 4, 0x03000000])
def test_other_versions_and_big_endian_files_are_refused(tmp_path, version):
    data = bytearray(File({"a": 1}).to_bytes())
    data[4:8] = version.to_bytes(4, "little")
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(UnreadableGGUF, match="version"):
        read_header(path)


def test_unknown_tensor_types_are_named_by_number(tmp_path):
    header = read_header(File({}, [Tensor("w", (32,), 99, bytes(64))]).write(tmp_path / "m.gguf"))
    assert header.tensors["w"].type_name == "type 99"


def test_rows_that_do_not_fill_their_blocks_are_refused(tmp_path):
    path = File({}, [Tensor("w", (2, 48), 2, bytes(54))]).write(tmp_path / "m.gguf")
    with pytest.raises(UnreadableGGUF, match="does not fill Q4_0 blocks"):
        read_header(path)


@pytest.mark.parametrize("shape", [(0, 32), (4, 0), ()])
def test_a_tensor_without_elements_is_refused(tmp_path, shape):
    path = File({}, [Tensor("w", shape, 0, b"")]).write(tmp_path / "m.gguf")
    with pytest.raises(UnreadableGGUF, match="a tensor w of shape"):
        read_header(path)


def _one_entry(kind, payload):
    """A file whose only metadata entry has the given type and payload."""
    entry = struct.pack("<Q", 1) + b"a" + struct.pack("<I", kind) + payload
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry


HOSTILE = {
    "huge array": _one_entry(9, struct.pack("<IQ", 0, 1 << 40)),
    "huge array of strings": _one_entry(9, struct.pack("<IQ", 8, 1 << 63)),
    "huge string": _one_entry(8, struct.pack("<Q", 1 << 62)),
    "huge number of entries": b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60) + bytes(100),
    "huge number of tensors": b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0) + bytes(100),
    "nested arrays": _one_entry(9, struct.pack("<IQ", 9, 1) * 100_000),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_counts_are_refused(tmp_path, case):
    path = tmp_path / "m.gguf"
    path.write_bytes(HOSTILE[case])
    with pytest.raises(UnreadableGGUF, match=r"ends too early|not a readable"):
        read_header(path)


@pytest.mark.parametrize("offset", [1 << 20, (1 << 64) - 32])
def test_a_tensor_outside_the_file_is_refused(tmp_path, offset):
    data = bytearray(File({}, [plain("w", [[1.0] * 8])]).to_bytes())
    assert data[53:65] == struct.pack("<IQ", 0, 0)  # the tensor's type and offset
    data[57:65] = struct.pack("<Q", offset)
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(UnreadableGGUF, match="ends too early"):
        read_header(path)


WHOLE = TinyModel(num_layers=1).file("F32").to_bytes()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, len(WHOLE) - 1))
def test_a_file_cut_anywhere_is_refused(tmp_path_factory, length):
    path = tmp_path_factory.mktemp("cut") / "m.gguf"
    path.write_bytes(WHOLE[:length])
    with pytest.raises(UnreadableGGUF):
        read_header(path)


@settings(max_examples=100, deadline=None)
@given(st.integers(4, 400), st.integers(0, 255))
def test_a_damaged_byte_never_raises_anything_else(tmp_path_factory, at, value):
    path = tmp_path_factory.mktemp("damaged") / "m.gguf"
    path.write_bytes(WHOLE[:at] + bytes([value]) + WHOLE[at + 1 :])
    with contextlib.suppress(UnreadableGGUF):
        read_header(path)
