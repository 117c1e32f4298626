"""An encoder as a pooling model: token ids in, one vector for each input out, computed in small parts."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from outrider.cpu.matmul import MAX_TOKENS
from outrider.models import machine
from outrider.models.dtypes import settle_dtype
from outrider.models.encoders.families import family_of, shape_of
from outrider.models.encoders.network import Biases, Encoder, EncoderLayer, Groups
from outrider.models.encoders.pooling_files import PoolingSpec
from outrider.models.encoders.state_pooling import pool
from outrider.models.encoders.weights import load_weights
from outrider.models.errors import ModelUnavailable
from outrider.pooling import PoolingFacts, PoolingKind, TokenInput, Vector

# Tokens of a pass. On a CPU the most that cpu/matmul.py computes: a token's result is then the same to the
# bit in every pass. On a GPU chosen by hand.
CPU_PASS_TOKENS = MAX_TOKENS
GPU_PASS_TOKENS = 4096


@dataclass(frozen=True)
class EncoderModel:
    """Computes one layer at a time: a layer of a pass is a part, and of a long input several parts."""

    network: Encoder
    spec: PoolingSpec
    first_position: int
    facts: PoolingFacts

    def run(self, inputs: Sequence[TokenInput]) -> Generator[None, None, list[Vector]]:
        order = sorted(range(len(inputs)), key=lambda i: len(inputs[i]))
        arranged = [inputs[i] for i in order]
        groups = [(len(list(same)), length) for length, same in groupby(map(len, arranged))]
        hidden = self.network.embed(*_packed(arranged, self.first_position))
        biases = self.network.biases(groups)
        for layer in self.network.layers:
            hidden = yield from self._layer(layer, hidden, groups, biases)
        vectors = np.array(self._pooled(hidden, groups))
        results: list[Vector] = [vectors[0]] * len(inputs)
        for place, i in enumerate(order):
            results[i] = vectors[place]
        return results

    def _layer(
        self, layer: EncoderLayer, hidden: mx.array, groups: Groups, biases: Biases
    ) -> Generator[None, None, mx.array]:
        size, num_tokens = self.facts.pass_tokens, hidden.shape[0]
        if num_tokens <= size:
            hidden = layer(hidden, groups, biases)
            mx.eval(hidden)
            yield
            return hidden
        # One long input: its keys and values first, then the rest of the layer, part by part.
        firsts = range(0, num_tokens, size)
        cells = []
        for first in firsts:
            cells.append(layer.keys_values(hidden[first : first + size]))
            mx.eval(cells[-1])
            yield
        keys, values = (mx.concatenate(list(each), axis=2) for each in zip(*cells, strict=True))
        bias, done = biases.get(num_tokens), []
        for first in firsts:
            own_bias = None if bias is None else bias[:, first : first + size]
            done.append(layer.part(hidden[first : first + size], keys, values, own_bias))
            mx.eval(done[-1])
            yield
        return mx.concatenate(done)

    def _pooled(self, hidden: mx.array, groups: Groups) -> mx.array:
        """[tokens, hidden] -> [inputs, dimensions] in float32"""
        vectors, first = [], 0
        for num_inputs, length in groups:
            last = first + num_inputs * length
            states = hidden[first:last].reshape(num_inputs, length, -1)
            first = last
            if self.facts.kind == "reranker":
                vectors.append(self.network.head(states[:, 0]).astype(mx.float32))
            else:
                vectors.append(pool(states.astype(mx.float32), self.spec.mode))
        return mx.concatenate(vectors)


def _packed(inputs: Sequence[TokenInput], first_position: int) -> tuple[mx.array, mx.array, mx.array]:
    """Ids, positions and types of all tokens, one input behind the other.  [tokens] each"""
    ids = [i for each in inputs for i in each.ids]
    positions = [first_position + i for each in inputs for i in range(len(each))]
    types = [i for each in inputs for i in each.type_ids or (0,) * len(each)]
    return mx.array(ids), mx.array(positions), mx.array(types)


def load_encoder(
    folder: Path, config: dict[str, Any], kind: PoolingKind, spec: PoolingSpec, name: str, dtype: str
) -> EncoderModel:
    """Raises ModelUnavailable. `dtype` "auto": float32 on the CPU, elsewhere that of the checkpoint."""
    family, shape = family_of(config), shape_of(config)
    if kind == "reranker":
        _check_labels(folder, config)
    network = Encoder(shape, family.head_activation if kind == "reranker" else None)
    load_weights(network, folder, family, config)
    network.eval()
    settle_dtype(network, dtype)
    facts = PoolingFacts(
        name=name,
        kind=kind,
        dimensions=1 if kind == "reranker" else shape.hidden_size,
        max_tokens=min(shape.max_tokens, spec.max_tokens or shape.max_tokens),
        vocab_size=shape.vocab_size,
        pooling=spec.mode,
        is_normalised=spec.is_normalised,
        pass_tokens=CPU_PASS_TOKENS if machine.is_cpu() else GPU_PASS_TOKENS,
        dtype=str(network.words.weight.dtype).removeprefix("mlx.core."),
        device=machine.device_name(),
    )
    return EncoderModel(network, spec, shape.first_position, facts)


def _check_labels(folder: Path, config: dict[str, Any]) -> None:
    labels = config.get("id2label")
    num_labels = len(labels) if isinstance(labels, dict) else int(config.get("num_labels", 2))
    if num_labels != 1:
        raise ModelUnavailable(
            f"{folder} classifies texts into {num_labels} labels. Rerankers have one label: a score."
        )
