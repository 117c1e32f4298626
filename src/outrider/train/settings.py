"""The settings of a training run: validated, frozen, and the same after a resume. No MLX."""

from __future__ import annotations

import math
from dataclasses import dataclass

from outrider.config import HEAD_BITS, HEAD_GROUP_SIZES
from outrider.request import MAX_DEPTH
from outrider.train.errors import TrainingError

DEFAULT_STEPS = 2000  # chosen by hand
MIN_CONVERSATIONS = 20  # two of them are held out: see HELD_OUT_EVERY in conversations.py


@dataclass(frozen=True)
class TrainingSettings:
    conversations: int = 4000
    steps: int | None = None  # with `seconds` too: the run ends at the limit that comes first
    seconds: float | None = None  # of training, without the synthesis
    batch_tokens: int = 4096  # targets in a step
    depths: int = 3
    learning_rate: float = 0.015  # of the matrices; the rate of recipes/default_head
    max_tokens: int = 256  # in an answer
    seed: int = 0
    bits: int | None = None  # of the written head's linear layers; None: they are not quantised
    group_size: int | None = None  # weights that share a scale; None: DEFAULT_HEAD_GROUP_SIZE

    def __post_init__(self) -> None:
        _at_least("--conversations", self.conversations, MIN_CONVERSATIONS)
        _at_least("--batch-tokens", self.batch_tokens, 16)
        _at_least("--max-tokens", self.max_tokens, 4)
        if self.steps is not None:
            _at_least("--steps", self.steps, 1)
        if self.seconds is not None and not 0 < self.seconds < math.inf:
            raise TrainingError(f"--seconds must be above 0, not {self.seconds!r}.")
        if not 1 <= self.depths <= MAX_DEPTH:
            raise TrainingError(f"--depths must be 1..{MAX_DEPTH}, not {self.depths!r}.")
        if not 0 < self.learning_rate <= 1:
            raise TrainingError(f"--learning-rate must be above 0 and at most 1, not {self.learning_rate!r}.")
        if self.bits is None and self.group_size is not None:
            raise TrainingError("--group-size needs --bits.")
        _one_of("--bits", self.bits, HEAD_BITS)
        _one_of("--group-size", self.group_size, HEAD_GROUP_SIZES)

    @property
    def num_steps(self) -> int | None:
        """None: only `seconds` ends the run."""
        return DEFAULT_STEPS if self.steps is None and self.seconds is None else self.steps


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise TrainingError(f"{name} must be at least {least}, not {value!r}.")


def _one_of(name: str, value: int | None, known: tuple[int, ...]) -> None:
    if value is not None and value not in known:
        raise TrainingError(f"{name} must be one of {', '.join(map(str, known))}, not {value!r}.")
