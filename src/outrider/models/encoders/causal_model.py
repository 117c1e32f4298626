"""A causal model that is made for embeddings (Qwen3-Embedding, for example), as a pooling model.

The trunk reads inputs of about the same length as rows, chunk by chunk: a chunk of all rows is a part.

    row 0   a a a a | a a a a | a a         the last token's state of each row, or the sum of all its states,
    row 1   b b b b | b b b b | b           is taken from the chunk that has it
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from outrider.cache.placement import Placement
from outrider.models import loader, machine
from outrider.models.copied_weights import copied_bytes
from outrider.models.encoders.encoder_model import CPU_PASS_TOKENS, GPU_PASS_TOKENS
from outrider.models.encoders.pooling_files import PoolingSpec
from outrider.models.errors import ModelUnavailable
from outrider.models.trunk import Trunk, TrunkCache
from outrider.plan import MANY_TOKENS
from outrider.pooling import PoolingFacts, PoolingKind, TokenInput, Vector

MODES = ("lasttoken", "mean")
MIN_SHARE = 0.75  # of the longest row's tokens, for rows that share a chunk; chosen by hand
PART_S = 0.05  # seconds that a part should take; chosen by hand: about a decode step of a small model
MIN_PART_TOKENS = 16  # below that a part costs as much as its weights take to read; chosen by hand
CACHE_SHARE = 0.5  # of the free memory, for the cells of one input; chosen by hand


@dataclass
class PartSize:
    """Chooses how many tokens a part has, from the time that the last parts took."""

    most: int
    num_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_tokens = min(self.most, 4 * MIN_PART_TOKENS)

    def took(self, num_tokens: int, seconds: float) -> None:
        """Half or double: the same few shapes repeat."""
        if seconds > PART_S and num_tokens > MIN_PART_TOKENS:
            self.num_tokens = max(MIN_PART_TOKENS, self.num_tokens // 2)
        elif seconds < PART_S / 4 and num_tokens * 2 > self.num_tokens:
            self.num_tokens = min(self.most, self.num_tokens * 2)


class CausalModel:
    def __init__(self, trunk: Trunk, spec: PoolingSpec, facts: PoolingFacts) -> None:
        self.facts = facts
        self._trunk = trunk
        self._spec = spec
        self._part = PartSize(facts.pass_tokens)

    def run(self, inputs: Sequence[TokenInput]) -> Generator[None, None, list[Vector]]:
        results: dict[int, Vector] = {}
        for rows in grouped(inputs):
            vectors = yield from self._rows([inputs[i] for i in rows])
            results |= zip(rows, vectors, strict=True)
        return [results[i] for i in range(len(inputs))]

    def _rows(self, rows: Sequence[TokenInput]) -> Generator[None, None, np.ndarray]:
        """[rows, hidden] in float32"""
        lengths, first = mx.array([len(row) for row in rows]), 0
        longest = max(map(len, rows))
        cache = TrunkCache(self._trunk.layout)
        for buffers in cache.buffers():
            buffers.resize(len(rows), longest)
        pooled = mx.zeros((len(rows), self._trunk.hidden_size))
        while first < longest:
            width = min(longest - first, max(1, self._part.num_tokens // len(rows)))
            began_s = time.perf_counter()
            fed = mx.clip(lengths - first, 0, width)
            hidden = self._chunk(rows, first, width, fed, cache)
            pooled = self._pooled(pooled, hidden.astype(mx.float32), fed, first + width >= lengths)
            mx.eval(pooled, [buffers.arrays() for buffers in cache.buffers()])
            self._part.took(width * len(rows), time.perf_counter() - began_s)
            first += width
            yield
        return np.array(pooled / lengths[:, None] if self._spec.mode == "mean" else pooled)

    def _chunk(
        self, rows: Sequence[TokenInput], first: int, width: int, fed: mx.array, cache: TrunkCache
    ) -> mx.array:
        """The states of the tokens first, ..., first + width - 1 of every row.  [rows, width, hidden]"""
        ids = np.zeros((len(rows), width), np.int32)
        for row, each in enumerate(rows):
            part = each.ids[first : first + width]
            ids[row, : len(part)] = part
        starts = mx.full((len(rows),), first, mx.int32)
        longest = max(map(len, rows))
        place = Placement(
            range(len(rows)),
            starts,
            fed,
            width,
            first + width,
            longest,
            any_new=first == 0,
            commits_all=True,
            launches=True,
        )
        hidden = self._trunk.hidden(mx.array(ids), cache, place)
        cache.commit(fed)
        return hidden

    def _pooled(self, pooled: mx.array, hidden: mx.array, fed: mx.array, is_last: mx.array) -> mx.array:
        """`pooled` [rows, hidden] with what this chunk adds to it. `fed` [rows]: tokens of the chunk."""
        if self._spec.mode == "mean":
            is_token = mx.arange(hidden.shape[1])[None, :, None] < fed[:, None, None]
            return pooled + mx.where(is_token, hidden, 0.0).sum(axis=1)
        last = hidden[mx.arange(hidden.shape[0]), mx.maximum(fed - 1, 0)]
        return mx.where((is_last & (fed > 0))[:, None], last, pooled)


def grouped(inputs: Sequence[TokenInput]) -> list[list[int]]:
    """The inputs, longest first, in groups of about the same length."""
    groups: list[list[int]] = []
    for i in sorted(range(len(inputs)), key=lambda i: -len(inputs[i])):
        if groups and len(inputs[i]) >= MIN_SHARE * len(inputs[groups[-1][0]]):
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def load_causal(
    folder: Path,
    spec: PoolingSpec,
    name: str,
    dtype: str,
    check_wanted: Callable[[], None],
    cache_bytes: int | None = None,
) -> CausalModel:
    """Raises ModelUnavailable for a family or a pooling that is not supported."""
    if spec.mode not in MODES:
        raise ModelUnavailable(
            f"{folder}: the pooling {spec.mode!r} of a causal model is not supported: {', '.join(MODES)} are."
        )
    loaded = loader.load(folder, dtype, needs_logits=False, check_wanted=check_wanted)
    trunk = loaded.trunk
    trunk.prepare_for_serving()
    return CausalModel(trunk, spec, causal_facts(loaded, spec, name, "embedding", cache_bytes))


def causal_facts(
    loaded: loader.LoadedModel, spec: PoolingSpec, name: str, kind: PoolingKind, cache_bytes: int | None
) -> PoolingFacts:
    """`cache_bytes`: memory for the cells of a pass; None: a part of what is free."""
    trunk = loaded.trunk
    most_tokens = _most_cells(trunk, cache_bytes)
    pass_tokens = CPU_PASS_TOKENS if machine.is_cpu() else GPU_PASS_TOKENS
    if copied_bytes(trunk) > (1 - CACHE_SHARE) * machine.free_bytes():
        pass_tokens = min(pass_tokens, MANY_TOKENS - 1)  # no weights are dequantised
    return PoolingFacts(
        name=name,
        kind=kind,
        dimensions=trunk.hidden_size if kind == "embedding" else 1,
        max_tokens=min(trunk.max_context, spec.max_tokens or trunk.max_context, most_tokens),
        vocab_size=_vocab_size(loaded.config, trunk),
        pooling=spec.mode,
        is_normalised=spec.is_normalised,
        pass_tokens=min(pass_tokens, most_tokens),
        dtype=str(trunk.dtype).removeprefix("mlx.core."),
        device=machine.device_name(),
    )


def _most_cells(trunk: Trunk, cache_bytes: int | None) -> int:
    """Tokens of a pass whose cells fit into the memory. Rows of a chunk are padded to the longest one."""
    per_cell = sum(buffers.spec.bytes_per_cell for buffers in TrunkCache(trunk.layout).buffers())
    if not per_cell:
        return trunk.max_context
    num_bytes = CACHE_SHARE * machine.free_bytes() if cache_bytes is None else MIN_SHARE * cache_bytes
    return max(1, math.floor(num_bytes / per_cell))


def _vocab_size(config: dict[str, Any], trunk: Trunk) -> int:
    return min(int(config.get("vocab_size") or trunk.vocab_size), trunk.vocab_size)
