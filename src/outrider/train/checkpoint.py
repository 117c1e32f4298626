"""The checkpoint of a training run: one file with everything that the next step depends on.

Must not know how a step is done.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from outrider.train.errors import TrainingError
from outrider.train.evaluate import Acceptance
from outrider.train.output_files import write_tensors

FILE_NAME = "checkpoint.safetensors"
Tree = Any  # nested dicts and lists of arrays


@dataclass(frozen=True)
class Milestone:
    """The acceptance of the head after `step` steps."""

    step: int
    held_out: Acceptance


@dataclass(frozen=True)
class TrainState:
    """The run after `step` steps. Immutable: the next step makes a new state."""

    step: int
    head: Tree
    optimizer: Tree
    num_targets: int = 0  # trained on so far; a target of a second epoch counts again
    trained_s: float = 0.0
    milestones: tuple[Milestone, ...] = ()


def save(folder: Path, state: TrainState) -> None:
    tensors: dict[str, mx.array] = dict(tree_flatten({"head": state.head, "optimizer": state.optimizer}))
    facts = {
        "step": state.step,
        "num_targets": state.num_targets,
        "trained_s": state.trained_s,
        "milestones": [asdict(one) for one in state.milestones],
    }
    write_tensors(folder / FILE_NAME, tensors, {"facts": json.dumps(facts)})


def load(folder: Path) -> TrainState | None:
    """The last checkpoint of the run; None: there is none yet."""
    path = folder / FILE_NAME
    if not path.exists():
        return None
    try:
        loaded: Any = mx.load(str(path), return_metadata=True)
        tensors, metadata = loaded
        trees = tree_unflatten(list(tensors.items()))
        facts = json.loads(metadata["facts"])
        return TrainState(
            facts["step"],
            trees["head"],
            trees.get("optimizer", {}),  # empty before the first step
            facts["num_targets"],
            facts["trained_s"],
            tuple(_milestone(one) for one in facts["milestones"]),
        )
    except (RuntimeError, KeyError, ValueError) as error:
        raise TrainingError(f"{path} is damaged ({error}). Start afresh with --force.") from error


def _milestone(record: dict) -> Milestone:
    counts = record["held_out"]
    return Milestone(
        record["step"], Acceptance(counts["steps"], tuple(counts["drafted"]), tuple(counts["accepted"]))
    )
