import gguf_reference
import mlx.core as mx
import numpy as np
import pytest
from gguf_writer import FACTORS, File, plain, random_blocks

from outrider.models.gguf.blocks import AFFINE_TYPES, GROUP_SIZE, pack, read_tensor
from outrider.models.gguf.header import read_header

EXACT = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
ROUNDED = ("Q4_K", "Q5_K", "Q6_K")


def read_back(path):
    info = read_header(path).tensors["w.weight"]
    parts = read_tensor(path, info)
    if "scales" not in parts:
        return np.array(parts["weight"].astype(mx.float32))
    scales, biases = parts["scales"].astype(mx.float32), parts["biases"].astype(mx.float32)
    bits = AFFINE_TYPES[info.type_name].bits
    return np.array(mx.dequantize(parts["weight"], scales, biases, group_size=GROUP_SIZE, bits=bits))


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


@pytest.mark.parametrize("bits", [4, 5, 8])
def test_packing_is_what_mlx_unpacks(bits):
    codes = np.random.default_rng(1).integers(0, 1 << bits, size=(3, 64), dtype=np.uint8)
    packed = mx.array(pack(codes.reshape(-1, 32), bits).reshape(3, -1))
    ones = mx.ones((3, 2))
    np.testing.assert_array_equal(
        np.array(mx.dequantize(packed, ones, 0 * ones, group_size=32, bits=bits)), codes
    )
