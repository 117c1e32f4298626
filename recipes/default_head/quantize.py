"""Quantises the linear layers of a head to 8 bits in groups of 64.

    python recipes/default_head/quantize.py MODEL head.safetensors out.safetensors

Needs Outrider and no PyTorch. MODEL is the model of the head: a folder or a name.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from outrider.models.heads import Quantization
from outrider.models.loader import load
from outrider.train.head_file import quantized_weights
from outrider.train.output_files import write_tensors

HOW = Quantization(bits=8, group_size=64)
PREFIX, DRAFT_IDS = "mtp.", "mtp.draft_ids"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("model")
    parser.add_argument("head", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    tensors, metadata = mx.load(str(args.head), return_metadata=True)  # type: ignore[misc]
    draft_ids = tensors.pop(DRAFT_IDS)
    float_weights = tree_unflatten([(name.removeprefix(PREFIX), array) for name, array in tensors.items()])
    weights, layers = quantized_weights(float_weights, HOW, load(args.model).trunk)
    quantized = {f"{PREFIX}{name}": array for name, array in tree_flatten(weights)}
    write_tensors(args.out, {DRAFT_IDS: draft_ids, **quantized}, {**metadata, **layers.metadata()})
    print(layers.describe(args.head.stat().st_size, args.out.stat().st_size))


if __name__ == "__main__":
    main()
