import gguf
import gguf_reference
import mlx.core as mx
import numpy as np
import pytest
from gguf_writer import FACTORS, File, Tensor, plain, random_blocks

from outrider.models.dtypes import dense_weight
from outrider.models.errors import UnreadableGGUF
from outrider.models.gguf.blocks import (
    PLAIN_TYPES,
    QUANTIZED_TYPES,
    pack,
    read_tensor,
    readable_types,
)
from outrider.models.gguf.header import read_header

EXACT = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
ROUNDED = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
DENSE = sorted({*readable_types()} - PLAIN_TYPES.keys() - QUANTIZED_TYPES.keys())


def read_back(path):
    info = read_header(path).tensors["w.weight"]
    parts = read_tensor(path, info)
    if "scales" not in parts:
        return np.array(parts["weight"].astype(mx.float32))
    kind = QUANTIZED_TYPES[info.type_name]
    weights = parts["weight"], parts["scales"], parts.get("biases")
    return np.array(dense_weight(*weights, kind.group_size, kind.bits, kind.mode))


@pytest.fixture
def random_file(tmp_path):
    def write(kind):
        tensor = random_blocks("w.weight", (6, 512), kind, np.random.default_rng(7))
        return File({}, [tensor]).write(tmp_path / "m.gguf")

    return write


def test_every_quantised_type_is_covered():
    assert {*EXACT, *ROUNDED} == FACTORS.keys()


@pytest.mark.parametrize("kind", EXACT)
def test_simple_types_keep_every_bit(random_file, kind):
    path = random_file(kind)
    _, tensors = gguf_reference.read(path)
    np.testing.assert_array_equal(read_back(path), tensors["w.weight"])


@pytest.mark.parametrize("kind", ROUNDED)
def test_k_quants_are_rounded_to_half_precision_and_no_more(random_file, kind):
    path = random_file(kind)
    _, tensors = gguf_reference.read(path)
    expected = tensors["w.weight"]
    assert np.abs(read_back(path) - expected).max() <= 2**-10 * np.abs(expected).max()


def raw_file(tmp_path, shape, kind, rng, mask):
    """A tensor of random bytes, each with only the bits of `mask`."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = rng.integers(0, 256, size=int(np.prod(shape)) // block * block_bytes, dtype=np.uint8) & mask
    tensor = Tensor("w.weight", shape, gguf.GGMLQuantizationType[kind].value, raw.tobytes())
    return raw, File({}, [tensor]).write(tmp_path / "m.gguf")


def test_every_type_that_the_gguf_package_dequantises_is_read():
    assert {"IQ1_S", "IQ2_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "TQ2_0"} <= {*DENSE}


@pytest.mark.parametrize("kind", [*EXACT, *ROUNDED])
def test_types_that_stay_quantised_have_the_values_of_the_gguf_package(random_file, kind):
    path = random_file(kind)
    expected = gguf.dequantize(gguf.GGUFReader(path).tensors[0].data, gguf.GGMLQuantizationType[kind])
    if kind in EXACT:
        np.testing.assert_array_equal(read_back(path), expected)
    else:
        assert np.abs(read_back(path) - expected).max() <= 2**-10 * np.abs(expected).max()


def test_mxfp4_keeps_every_bit(tmp_path):
    raw, path = raw_file(tmp_path, (40, 256), "MXFP4", np.random.default_rng(5), mask=0x7F)
    expected = gguf.dequantize(raw.reshape(40, -1), gguf.GGMLQuantizationType.MXFP4)
    assert len(np.unique(raw.reshape(-1, 17)[:, 0])) > 50  # scales
    np.testing.assert_array_equal(read_back(path), expected)


@pytest.mark.parametrize("kind", DENSE)
def test_other_types_become_float16(tmp_path, kind):
    """A mask of 0x3F makes every float16 in the blocks smaller than 2."""
    rng = np.random.default_rng(5)
    raw, path = raw_file(tmp_path, (1100, 256), kind, rng, mask=0x3F)  # rows of two batches
    info = read_header(path).tensors["w.weight"]
    array = np.array(read_tensor(path, info)["weight"])
    expected = gguf.dequantize(raw.reshape(1100, -1), gguf.GGMLQuantizationType[kind])
    assert np.abs(expected).max() > 0
    assert array.dtype == np.float16
    np.testing.assert_array_equal(array, expected.astype(np.float16))


@pytest.mark.parametrize("kind", ["Q8_0", "Q6_K"])
def test_a_quantised_vector_becomes_float16(tmp_path, kind):
    tensor = random_blocks("w.weight", (512,), kind, np.random.default_rng(7))
    path = File({}, [tensor]).write(tmp_path / "m.gguf")
    _, tensors = gguf_reference.read(path)
    parts = read_tensor(path, read_header(path).tensors["w.weight"])
    assert parts.keys() == {"weight"}
    np.testing.assert_array_equal(np.array(parts["weight"]), tensors["w.weight"].astype(np.float16))


@pytest.mark.parametrize("kind", [*QUANTIZED_TYPES, *DENSE])
def test_random_bytes_are_read_or_refused(tmp_path, kind):
    for seed in range(5):
        _, path = raw_file(tmp_path, (4, 256), kind, np.random.default_rng(seed), mask=0xFF)
        try:
            parts = read_tensor(path, read_header(path).tensors["w.weight"])
        except UnreadableGGUF:
            continue
        assert all(np.isfinite(np.array(array.astype(mx.float32))).all() for array in parts.values())


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_what_mlx_reads_itself_is_the_same(random_file, kind):
    path = random_file(kind)
    parts = read_tensor(path, read_header(path).tensors["w.weight"])
    theirs = mx.load(str(path))
    for part, array in parts.items():
        assert mx.array_equal(array, theirs[f"w.{part}"]).item()


@pytest.mark.parametrize(("kind", "dtype"), [("F32", mx.float32), ("F16", mx.float16), ("BF16", mx.bfloat16)])
def test_plain_types_keep_their_dtype(tmp_path, kind, dtype):
    values = np.array([[0.5, -3.0, 1e-8], [2.0, 65280.0, 0.0]], np.float32)
    path = File({}, [plain("w.weight", values, kind)]).write(tmp_path / "m.gguf")
    array = read_tensor(path, read_header(path).tensors["w.weight"])["weight"]
    assert array.dtype == dtype
    _, tensors = gguf_reference.read(path)
    np.testing.assert_array_equal(np.array(array.astype(mx.float32)), tensors["w.weight"])


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_packing_is_what_mlx_unpacks(bits):
    codes = np.random.default_rng(1).integers(0, 1 << bits, size=(3, 64), dtype=np.uint8)
    packed = mx.array(pack(codes.reshape(-1, 32), bits).reshape(3, -1))
    ones = mx.ones((3, 2))
    np.testing.assert_array_equal(
        np.array(mx.dequantize(packed, ones, 0 * ones, group_size=32, bits=bits)), codes
    )
