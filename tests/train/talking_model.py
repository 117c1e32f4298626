"""A tiny model that has something to say: a trunk taught, in a few seconds, to chant words in a fixed order.

Which word comes next is certain, which one comes first is not; a chant is far longer than an answer, so that
it is no loop. What it answers is therefore easy for a trained head to draft, and hard for an untrained one.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optimizers
import numpy as np
from tokenizers import Tokenizer

from tiny_models import save_checkpoint, tiny_config, tiny_model, write_tokenizer

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "rope_scaling": None}
END_ID, USER_ID, ASSISTANT_ID = 0, 2, 3
NUM_WORDS = 12
WIDTH = 64


def write_talking_model(folder: Path, family: str, num_steps: int = 120) -> None:
    """A model folder, with a chat template, whose model answers with a chant."""
    changes = {**SMALL, "eos_token_id": END_ID}
    model = tiny_model(family, **changes)
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    _teach(model, tokenizer, num_steps)
    save_checkpoint(folder, model, tiny_config(family) | changes)


def _words() -> list[str]:
    rng = random.Random(5)
    return [
        "".join(rng.sample("abcdefghijklmnopqrstuvwxyz", rng.randint(3, 6))) + " " for _ in range(NUM_WORDS)
    ]


def _chant(rng: random.Random, words: list[str]) -> str:
    start = rng.randrange(NUM_WORDS)
    return "".join(words[(start + i) % NUM_WORDS] for i in range(rng.randint(2, 14)))


def _example(rng: random.Random, words: list[str], tokenizer: Any) -> list[int]:
    asked = tokenizer.encode(_chant(rng, words)[: rng.randint(3, 20)]).ids
    answered = tokenizer.encode(_chant(rng, words)).ids
    ids = [USER_ID, *asked, END_ID, ASSISTANT_ID, *answered, END_ID]
    return (ids + [END_ID] * WIDTH)[:WIDTH]


def _teach(model: nn.Module, tokenizer: Any, num_steps: int) -> None:
    rng, words = random.Random(1), _words()
    optimizer = optimizers.Adam(learning_rate=4e-3)

    def loss(model: nn.Module, ids: mx.array) -> mx.array:
        return nn.losses.cross_entropy(model(ids[:, :-1]), ids[:, 1:]).mean()

    step = nn.value_and_grad(model, loss)
    for _ in range(num_steps):
        ids = mx.array(np.array([_example(rng, words, tokenizer) for _ in range(16)], np.int32))
        _, gradients = step(model, ids)
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state)
