"""Merges the draft vocabulary of a head with that of the earlier head from which its training started.

    python recipes/default_head/merge_ids.py head.safetensors EARLIER_HEAD out.safetensors

Each vocabulary was counted on the conversations of one training stage. An id gets the better of its two
ranks. All ids of both lists stay: an id that cannot be drafted costs most where an answer repeats it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

NAME = "mtp.draft_ids"


def merged(own: Tensor, earlier: Tensor) -> Tensor:
    """One list of all ids, most frequent first. At equal ranks the lower id comes first."""
    both = torch.cat([own, earlier]).long()
    never = len(both)
    ranks = torch.full((2, int(both.max()) + 1), never)
    for row, ids in zip(ranks, (own, earlier), strict=True):
        row[ids.long()] = torch.arange(len(ids))
    return ranks.amin(0).argsort(stable=True)[: len(both.unique())].int()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("head", type=Path)
    parser.add_argument("earlier", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    arrays = load_file(args.head)
    with safe_open(args.head, "pt") as file:
        metadata = file.metadata()
    arrays[NAME] = merged(arrays[NAME], load_file(args.earlier)[NAME])
    save_file(arrays, args.out, metadata=metadata)


if __name__ == "__main__":
    main()
