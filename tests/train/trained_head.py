"""What the head of the tests here is trained with, and what training it leaves behind."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TRAIN_OPTIONS = {
    "conversations": 60,
    "steps": 60,
    "batch-tokens": 256,
    "max-tokens": 48,
    "depths": 2,
    "seed": 1,
}


@dataclass(frozen=True)
class Trained:
    folder: Path
    head: Path
    stdout: str
    stderr: str
