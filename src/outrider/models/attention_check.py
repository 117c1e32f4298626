"""Compares the attention kernels with MLX's operations, on random rows in blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from outrider.cache.placement import Placement, block_tables
from outrider.cache.ragged_kv import KVSpec
from outrider.models.cuda_attention import SPLIT
from outrider.plan import BLOCK_SIZE, NUM_SPARE_BLOCKS

WINDOW = 70  # cells
LONG, SHORT = (3, 100, SPLIT + 40), (3, 100)  # cells of the rows; the parts of long rows are merged
# Rows, width, and whether there are a window and sinks. More queries need kernels for more of them at once.
CASES = ((LONG, 3, False), (LONG, 3, True), (LONG, 9, False), (SHORT, 3, False), (SHORT, 9, False))

# attention_kernels.attend: queries, cells, spec, place, scale, window, sinks
Attend = Callable[[mx.array, Sequence[mx.array], KVSpec, Placement, float, int, mx.array | None], mx.array]


def largest_error(attend: Attend, spec: KVSpec) -> float:
    """All kernels are used. To compile one takes about a second: better here than in a request."""
    return float(mx.stack([_error(attend, spec, *case) for case in CASES]).max())


def _error(attend: Attend, spec: KVSpec, lengths: Sequence[int], width: int, has_window: bool) -> mx.array:
    """`has_window`: with a window and sinks."""
    dim, num_heads = spec.key_dim, 3 * spec.num_heads
    num_blocks = [-(-(num + width) // BLOCK_SIZE) for num in lengths]
    firsts = [NUM_SPARE_BLOCKS + sum(num_blocks[:row]) for row in range(len(lengths))]
    tables = block_tables([range(f, f + n) for f, n in zip(firsts, num_blocks, strict=True)])
    random = mx.random.split(mx.random.key(0), 4)
    shape = (NUM_SPARE_BLOCKS + sum(num_blocks), spec.num_heads, BLOCK_SIZE, dim)
    vectors = [mx.random.normal(shape, key=key).astype(spec.dtype) for key in random[:2]]
    encoded = [spec.key_format.encode(one) for one in vectors]
    cells = [array for parts in encoded for array in parts]
    keys, values = (spec.key_format.decode(parts) for parts in encoded)
    queries = mx.random.normal((len(lengths), num_heads, width, dim), key=random[2]).astype(spec.dtype)
    starts = mx.array(list(lengths))
    fed = mx.full(starts.shape, width, mx.int32)
    place = Placement(range(len(lengths)), starts, fed, width, max(lengths) + width, 0, tables=tables)
    window = WINDOW if has_window else 0
    sinks = mx.random.normal((num_heads,), key=random[3]) if has_window else None
    got = attend(queries, cells, spec, place, dim**-0.5, window, sinks)
    want = _portable(queries, keys, values, place, dim**-0.5, window, sinks)
    return mx.abs(got.astype(mx.float32) - want).max()


def _portable(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    place: Placement,
    scale: float,
    window: int,
    sinks: mx.array | None,
) -> mx.array:
    """The same in MLX's operations, in float32."""
    rows, num_heads = queries.shape[:2]
    kv_heads = keys.shape[1]

    def gathered(buffer: mx.array) -> mx.array:  # [rows, heads, cells, dim]
        own = buffer.astype(mx.float32)[place.tables].transpose(0, 2, 1, 3, 4)
        cells = own.reshape(rows, kv_heads, -1, own.shape[-1])[:, :, : place.num_attended]
        return mx.repeat(cells, num_heads // kv_heads, axis=1)

    # Sums of products: matmuls of float32 are rounded more on some GPUs.
    scores = (scale * queries.astype(mx.float32)[:, :, :, None] * gathered(keys)[:, :, None]).sum(axis=-1)
    scores = mx.where(place.mask(window or None), scores, -mx.inf)
    if sinks is not None:
        column = mx.broadcast_to(sinks[None, :, None, None], (*scores.shape[:3], 1))
        scores = mx.concatenate([scores, column], axis=-1)
    weights = mx.softmax(scores, axis=-1)[..., : place.num_attended]
    return (weights[..., None] * gathered(values)[:, :, None]).sum(axis=-2)
