"""Attention over blocks and over slots, and the writes before it, each kernel alone on this device.

python -m benchmarks.gpu.attention
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from outrider.cache.placement import Placement, block_tables
from outrider.cache.ragged_kv import KVSpec, LayerView, RaggedKV
from outrider.models import attention_kernels
from outrider.models.attention_check import largest_error
from outrider.plan import BLOCK_SIZE, NUM_SPARE_BLOCKS

TIMES, ROUNDS = 20, 5


@dataclass(frozen=True)
class Shape:
    num_heads: int
    kv_heads: int
    dim: int


SHAPES = {"qwen3.5-27b": Shape(24, 4, 256), "qwen3-4b": Shape(32, 8, 128), "smollm2": Shape(9, 3, 64)}
LENGTHS: dict[str, list[int]] = {
    "1 x 256": [256],
    "8 x 256": [256] * 8,
    "8 x 2048": [2048] * 8,
    "32 x 1024": [1024] * 32,
    "7 x 300, 1 x 6000": [300] * 7 + [6000],
    "7 x 300, 1 x 30000": [300] * 7 + [30000],
}
WIDTHS = (1, 2, 3, 5, 9)


def timed_us(run: Callable[[], Sequence[mx.array]]) -> float:
    """The best of several rounds, for each of TIMES calls in one graph."""
    best = float("inf")
    for _ in range(ROUNDS):
        arrays = [array for _ in range(TIMES) for array in run()]
        began = time.perf_counter()
        mx.eval(arrays)
        best = min(best, time.perf_counter() - began)
    return 1e6 * best / TIMES


def place_of(lengths: list[int], width: int, in_blocks: bool) -> Placement:
    ends = [num + width for num in lengths]
    starts, fed = mx.array(lengths), mx.full((len(lengths),), width, mx.int32)
    if not in_blocks:
        capacity = -(-max(ends) // 256) * 256
        return Placement(range(len(lengths)), starts, fed, width, max(ends), capacity)
    tables, first = [], NUM_SPARE_BLOCKS
    for end in ends:
        num = -(-end // BLOCK_SIZE)
        tables.append(range(first, first + num))
        first += num
    return Placement(range(len(lengths)), starts, fed, width, max(ends), 0, tables=block_tables(tables))


def views(shape: Shape, lengths: list[int], width: int) -> tuple[LayerView, LayerView, LayerView]:
    """A layer's cells in slots, in blocks, and in blocks of 8 bits."""
    spec = KVSpec(shape.kv_heads, shape.dim, shape.dim, mx.bfloat16)
    slots, blocks, coded = RaggedKV(spec), RaggedKV(spec), RaggedKV(spec.quantized(8))
    in_slots, in_blocks = place_of(lengths, width, False), place_of(lengths, width, True)
    slots.resize(len(lengths), in_slots.capacity)
    assert in_blocks.tables is not None
    for kv in (blocks, coded):
        kv.resize_blocks(1 + int(in_blocks.tables.max()), BLOCK_SIZE)
    for kv in (slots, blocks):
        kv.put([mx.random.normal(x.shape, mx.bfloat16) for x in kv.arrays()])
        mx.eval(kv.arrays())
    return LayerView(slots, in_slots), LayerView(blocks, in_blocks), LayerView(coded, in_blocks)


def measure(name: str, shape: Shape, lengths: list[int], width: int) -> None:
    slots, blocks, coded = views(shape, lengths, width)
    queries = mx.random.normal((len(lengths), shape.num_heads, width, shape.dim), mx.bfloat16)
    mask, scale = slots.placement.mask(None), shape.dim**-0.5
    mx.eval(queries, mask)

    def of_slots() -> list[mx.array]:
        keys, values = slots.read()
        return [mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)]

    def of_blocks(view: LayerView) -> list[mx.array]:
        return [attention_kernels.attend(queries, view.arrays(), view.spec, view.placement, scale, 0, None)]

    def written(view: LayerView) -> Callable[[], list[mx.array]]:
        new = mx.random.normal((len(lengths), shape.kv_heads, width, shape.dim), mx.bfloat16)
        mx.eval(new)

        def write() -> list[mx.array]:
            view.write(new, new)
            return view.arrays()

        return write

    slots_us, blocks_us = timed_us(of_slots), timed_us(lambda: of_blocks(blocks))
    coded_us = timed_us(lambda: of_blocks(coded))
    num_bytes = sum(lengths) * shape.kv_heads * shape.dim * 2 * 2
    print(
        f"{name:28s} width {width}  slots {slots_us:8.1f}  blocks {blocks_us:8.1f} us  "
        f"({num_bytes / blocks_us / 1e6:5.2f} TB/s)  8 bits {coded_us:8.1f}   "
        f"writes {timed_us(written(slots)):7.1f} {timed_us(written(blocks)):7.1f} "
        f"{timed_us(written(coded)):7.1f} us",
        flush=True,
    )


def main() -> None:
    for model, shape in SHAPES.items():
        for dtype in (mx.float32, mx.bfloat16, mx.float16):
            for bits in (None, 8, 4):
                spec = KVSpec(2, shape.dim, shape.dim, dtype, bits=bits)
                error = largest_error(attention_kernels.attend, spec)
                print(model, dtype, bits, "off by", error, flush=True)
        for name, lengths in LENGTHS.items():
            for width in WIDTHS:
                measure(f"{model} {name}", shape, lengths, width)
        mx.clear_cache()


if __name__ == "__main__":
    main()
