"""One rank of divided heads of several families, for test_divided_heads.py: `python divided_heads.py OUT`.

Each family's head runs over two rows, prompt and then token by token, whole and divided. Rank 0 writes by how
much the outputs differ, or why the head cannot be divided.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import mlx.core as mx

from outrider.cache.placement import Placement
from outrider.models.heads import HeadNotDivisible, MTPHead, divide, head_layout
from outrider.models.trunk import Trunk, TrunkCache
from step.histories import random_head
from tiny_models import tiny_model

FAMILIES = (
    "llama", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe", "deepseek_v3", "deepseek_v32", "glm4_moe",
    "glm4_moe_lite", "exaone_moe", "longcat_flash",
)  # fmt: skip
SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2}
WIDTHS = (5, 1, 1, 3)
CAPACITY = 16


def outputs(head: MTPHead, trunk: Trunk) -> mx.array:
    """Of passes over two rows.  [rows, all widths, H]"""
    cache = TrunkCache([head_layout(head, trunk)])
    for buffers in cache.buffers():
        buffers.resize(2, CAPACITY)
    keys, found, start = iter(mx.random.split(mx.random.key(5), 2 * len(WIDTHS))), [], 0
    for width in WIDTHS:
        shape = 2, width, trunk.hidden_size
        hidden, embedded = (mx.random.normal(shape, key=next(keys)) for _ in range(2))
        starts, fed = mx.full(2, start), mx.full(2, width)
        place = Placement(range(2), starts, fed, width, start + width, CAPACITY)
        found.append(head(hidden, embedded, cache.views(place)[0])[0])
        start += width
    return mx.concatenate(found, axis=1)


def difference(family: str, group: mx.distributed.Group) -> float | str:
    trunk = Trunk(tiny_model(family, **SIZES), max_context=64)
    head = random_head(trunk)
    whole = outputs(head, trunk)
    try:
        divide([head], trunk, group)
    except HeadNotDivisible as error:
        return str(error)
    error_of = mx.abs(outputs(head, trunk) - whole).max() / mx.abs(whole).max()
    return float(error_of.item())


def main(out: str) -> None:
    group = mx.distributed.init(strict=True)
    found = {family: difference(family, group) for family in FAMILIES}
    if group.rank() == 0:
        Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
