"""Trains a small Qwen3.5 hybrid and its MTP head together from random weights, and writes a model folder.

    python recipes/tiny_hybrid/train.py OUT_FOLDER [--steps N]
    python recipes/tiny_hybrid/train.py OUT_FOLDER --shape 50m --steps 1500 --rows 32 --head-rows 8 \
        --width 256 --muon-rate 0.02 --adam-rate 0.003

The loss is the trunk's next-token loss plus the head's loss at each depth of its recursion. The result is a
function of the seed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import outrider  # noqa: F401  (before mlx: loads the fast BLAS)

# isort: split
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optimizers
import numpy as np
from checkpoint import SHAPES, config_of, exchange_text, new_tokenizer, write_folder
from delta_rule import train_in_parallel
from mlx_lm.models import qwen3_5
from tokenizers import Tokenizer

from outrider.models.heads import MTPHead, new_head
from outrider.models.trunk import Trunk
from outrider.progress import Progress, ProgressBar
from outrider.train.chain import chain_outputs
from outrider.train.optimizer import Muon, rate_factor
from text import exchanges, held_out

SEED = 5
# Chosen by hand.
DEPTH_WEIGHTS = (0.5, 0.4, 0.3)  # of the head's losses by depth; the trunk's loss has weight 1
TOKENIZER_EXCHANGES = 2000  # exchanges that train the tokenizer
HELD_OUT_QUESTIONS = 24  # three of each kind


class Pair(nn.Module):
    """The trunk and its head, trained together."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.model = qwen3_5.Model(qwen3_5.ModelArgs.from_dict(config))
        trunk = Trunk(self.model, config["text_config"]["max_position_embeddings"])
        self.head: MTPHead = new_head(trunk)
        _init(self)

    def losses(self, ids: mx.array, head_rows: int) -> list[mx.array]:
        """The trunk's loss, then the head's losses by depth, in nats per token.  ids [rows, width]

        `head_rows`: rows that train the head. It learns faster than the trunk and costs more per row.
        """
        inner = self.model.language_model.model
        hidden = inner(ids)
        some = ids[:head_rows]
        guesses = chain_outputs(self.head, hidden[:head_rows], inner.embed_tokens(some), len(DEPTH_WEIGHTS))
        return [
            self._loss(hidden, ids, 0),
            *[self._loss(out, some, depth) for depth, out in enumerate(guesses, 1)],
        ]

    def _loss(self, out: mx.array, ids: mx.array, depth: int) -> mx.array:
        """Column t of `out` guesses x_(t + depth + 1)."""
        logits = self.model.language_model.model.embed_tokens.as_linear(out[:, : -1 - depth])
        return nn.losses.cross_entropy(logits, ids[:, 1 + depth :], reduction="mean")


def _init(pair: Pair) -> None:
    """Small embeddings, because they are also the output projection. Gates with many rates of forgetting."""
    inner = pair.model.language_model.model
    inner.embed_tokens.weight = 0.05 * mx.random.normal(inner.embed_tokens.weight.shape)
    for layer in inner.layers:
        if layer.is_linear:
            heads = layer.linear_attn.num_v_heads
            layer.linear_attn.A_log = mx.log(mx.linspace(0.02, 1.0, heads))
            layer.linear_attn.dt_bias = mx.zeros(heads)


def rows(tokenizer: Tokenizer, seed: int, width: int) -> Iterator[list[int]]:
    """Each row begins with a new exchange; more exchanges follow until the row is full."""
    source = exchanges(seed)
    while True:
        row: list[int] = []
        while len(row) < width:
            row += tokenizer.encode(exchange_text(*next(source))).ids
        yield row[:width]


def new_optimizer() -> optimizers.MultiOptimizer:
    adam = optimizers.AdamW(learning_rate=0.0, betas=[0.9, 0.98], weight_decay=0.0, bias_correction=True)
    return optimizers.MultiOptimizer([Muon(learning_rate=0.0, weight_decay=0.05), adam], [_is_inner_matrix])


def _is_inner_matrix(name: str, parameter: Any) -> bool:
    return parameter.ndim == 2 and "embed_tokens" not in name and min(parameter.shape) > 8


def train(pair: Pair, tokenizer: Tokenizer, args: argparse.Namespace) -> list[float]:
    """Train, and return the running average of the losses at the end."""
    optimizer = new_optimizer()
    source = rows(tokenizer, args.seed, args.width)
    bar = ProgressBar()

    def total(ids: mx.array) -> tuple[mx.array, list[mx.array]]:
        first, *others = losses = pair.losses(ids, args.head_rows)
        return first + sum(w * loss for w, loss in zip(DEPTH_WEIGHTS, others, strict=True)), losses

    step_gradients = nn.value_and_grad(pair, total)
    average: np.ndarray | None = None
    for step in range(args.steps):
        factor = rate_factor(step, step / args.steps, args.steps)
        for one, rate in zip(optimizer.optimizers, (args.muon_rate, args.adam_rate), strict=True):
            one.learning_rate = factor * rate
        ids = mx.array(list(islice(source, args.rows)))
        (_, losses), gradients = step_gradients(ids)
        gradients, _ = optimizers.clip_grad_norm(gradients, 1.0)
        optimizer.update(pair, gradients)
        mx.eval(pair.parameters(), optimizer.state, losses)
        now = np.array([loss.item() for loss in losses])
        average = now if average is None else 0.9 * average + 0.1 * now
        note = "loss " + " ".join(f"{loss:.2f}" for loss in average)
        bar(Progress("Training", step + 1, args.steps, "steps", note, (step + 1) % 50 == 0))
    bar.close()
    assert average is not None
    return list(average)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="OUT_FOLDER")
    parser.add_argument("--shape", choices=SHAPES, default="1m", help="number of parameters (default: 1m)")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--rows", type=int, default=8, help="rows in a batch")
    parser.add_argument("--head-rows", type=int, default=2, help="rows of a batch that train the head")
    parser.add_argument("--width", type=int, default=128, help="tokens in a row, a power of two")
    parser.add_argument("--muon-rate", type=float, default=0.05, help="learning rate of the matrices")
    parser.add_argument("--adam-rate", type=float, default=0.005, help="learning rate of everything else")
    parser.add_argument("--seed", type=int, default=SEED)
    args = parser.parse_args()
    began = time.monotonic()
    mx.random.seed(args.seed)
    texts = (exchange_text(*one) for one in islice(exchanges(args.seed), TOKENIZER_EXCHANGES))
    tokenizer = new_tokenizer(texts)
    pair = Pair(config_of(args.shape))
    train_in_parallel()
    pair.train()
    losses = train(pair, tokenizer, args)
    questions = [question for question, _ in islice(held_out(args.seed), HELD_OUT_QUESTIONS)]
    write_folder(args.folder, config_of(args.shape), pair.model, pair.head, tokenizer, questions)
    print(f"{args.folder}: losses {' '.join(f'{x:.3f}' for x in losses)}, {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
