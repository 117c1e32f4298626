"""CUDA kernels that write the keys and values of a pass into their cells, in place: one launch for a layer.

MLX's scatter takes two launches, and one more to quantise. It also copies the whole buffer first if a kernel
that reads it is not known to have ended. These kernels never copy. They need kernels that run in the order of
their launch (`gpu_kernels.runs_in_order`), and blocks.

    group of lanes    one vector: a row's token, a head, its keys (group_z 0) or its values (1)

Padding is not written, nor are cells past a row's own blocks.
"""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from outrider import gpu_kernels
from outrider.cache import cell_kernels
from outrider.cache.cell_format import CellFormat
from outrider.cache.placement import Placement, block_tables
from outrider.gpu_kernels import GpuKernel
from outrider.plan import BLOCK_SIZE, JUNK_BLOCK, NUM_SPARE_BLOCKS

MAX_DIM = 256  # of a head
MAX_VECTORS = 65535  # of the keys of a pass: CUDA's limit for the second axis of a grid

_CELL = f"""
    const int cell = starts[row * starts_strides[0]] + token, cells_of_block = first_cells_shape[2];
    const int column = cell / cells_of_block;
    const bool is_fed = token < num_fed[row * num_fed_strides[0]] && column < tables_shape[1];
    const int block = is_fed ? tables[row * tables_strides[0] + column * tables_strides[1]] : 0;
    const bool is_written = block > {JUNK_BLOCK};
    const size_t place = ((size_t)block * num_heads + head) * cells_of_block + cell % cells_of_block;
"""
_PLAIN = f"""
    using Number = FIRST_CELLS_TYPE;
    Number* to = const_cast<Number*>(group_z == 0 ? first_cells : second_cells) + place * DIM;
    for (int d = lane; d < DIM && is_written; d += 32) to[d] = (Number){cell_kernels.NUMBER};
"""
_TO_CELLS = """
    uint32_t* to = const_cast<uint32_t*>(group_z == 0 ? first_cells : second_cells) + place * ROW_WORDS;
"""


def _kernel(name: str, body: str) -> GpuKernel:
    vectors, cells, bounds = ("first", "second"), ("first_cells", "second_cells"), ("starts", "num_fed")
    return GpuKernel(
        name,
        (*vectors, *cells, "tables", *bounds),
        ("done",),
        cell_kernels.PLACE + _CELL + body,
        strided=(*vectors, "tables", *bounds),
        in_place=cells,
    )


PLAIN = _kernel("write_cells", _PLAIN)
QUANTIZED = _kernel("write_quantized_cells", cell_kernels.SIZES + _TO_CELLS + cell_kernels.QUANTISE)


def write(
    keys: mx.array, values: mx.array, cells: tuple[mx.array, mx.array], own: CellFormat, place: Placement
) -> tuple[mx.array, mx.array]:
    """The cells of the keys and of the values as they are after the write. The caller drops the old arrays.

    keys, values [rows, heads, width, dim]; cells [blocks, heads, block size, elements]
    """
    rows, num_heads, width, dim = keys.shape
    assert place.tables is not None
    kernel: GpuKernel = PLAIN
    sizes: dict[str, int | mx.Dtype] = {"DIM": dim}
    if own.code_bits is not None:
        keys, values = keys.astype(own.dtype), values.astype(own.dtype)
        kernel, sizes = QUANTIZED, cell_kernels.constants(dim, own.code_bits, own.group_size, own.dtype)
    inputs = [keys, values, *cells, place.tables, place.starts, place.num_fed]
    key_cells, value_cells = gpu_kernels.write(kernel, inputs, sizes, (rows * num_heads * width, 2))
    return key_cells, value_cells


def supports(own: CellFormat, num_vectors: int = 1) -> bool:
    """Whether the kernels write so many keys, and as many values, of this format on this device."""
    return (
        own.dim <= MAX_DIM
        and num_vectors <= MAX_VECTORS
        and gpu_kernels.is_available()
        and gpu_kernels.runs_in_order()
        and (own.code_bits is None or (own.is_packed and _quantises(own, own.code_bits)))
        and _agrees(own)
    )


def _quantises(own: CellFormat, bits: int) -> bool:
    return cell_kernels.supports(own.dim, bits, own.group_size, own.dtype)


@cache
def _agrees(own: CellFormat) -> bool:
    return gpu_kernels.is_close(lambda: _num_wrong(own), "cell-writing", 0)


def _num_wrong(own: CellFormat) -> float:
    """Words or numbers that differ from what MLX's operations write, in all blocks but the junk one.

    Three rows: one over a border between blocks, one with padding, one past its own blocks.
    """
    num_heads, width, first = 2, 3, NUM_SPARE_BLOCKS
    tables = block_tables([[first + 1, first], [first + 2], [first + 3]])
    starts, num_fed = mx.array([BLOCK_SIZE - 1, 5, BLOCK_SIZE - 1]), mx.array([3, 1, 2])
    place = Placement(range(3), starts, num_fed, width, BLOCK_SIZE + 1, 0, tables=tables)
    keys, values = (
        mx.random.normal((3, width, num_heads, own.dim), key=key).astype(own.dtype).swapaxes(1, 2)
        for key in mx.random.split(mx.random.key(1), 2)
    )
    ((size, dtype),) = own.parts
    shape = (NUM_SPARE_BLOCKS + 4, num_heads, BLOCK_SIZE, size)
    index = place.written_in_blocks(num_heads)
    cells = mx.zeros(shape, dtype), mx.zeros(shape, dtype)
    mx.eval(cells)
    written = write(keys, values, cells, own, place)
    differ = []
    for got, encoded in zip(written, own.encode_both(keys, values), strict=True):
        want = mx.zeros(shape, dtype).reshape(-1, size)
        want[index] = encoded[0]
        differ.append((got != want.reshape(shape))[NUM_SPARE_BLOCKS:].sum())
    return float(mx.stack(differ).sum())
