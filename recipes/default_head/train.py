"""Trains the head of the default model on conversations of synthesise.py. The trunk stays frozen.

    python recipes/default_head/train.py MODEL_FOLDER conversations.safetensors head.safetensors

Two runs with the same conversations, seed and device take the same batches in the same order. A stopped run
goes on from its last checkpoint with --resume.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from batches import Batch, Group, TrainingData, endless
from conversations import Conversations
from head import Head, load_head
from loss import DraftLoss, LossRecipe
from muon import Muon
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from trunk import Trunk, dequantised, load_trunk

RESIDUAL_RMS = 27.0  # of the trunk's residual stream before its last layer, as measured
NUM_DRAFT_IDS = 16_384  # README.md compares sizes
VALIDATION_CONVERSATIONS = 512
REPORT_EVERY = 500  # steps
CHECKPOINT_EVERY = 5_000  # steps
EAGER_STEPS = 2  # steps of each width before its CUDA graph is captured


@dataclass(frozen=True)
class Recipe:
    steps: int = 62_000
    targets_per_step: int = 8_192
    matrix_rate: float = 0.015  # of Muon
    matrix_decay: float = 0.05
    norm_rate: float = 0.003  # of AdamW
    warm_up: int = 100
    final_rate: float = 0.01  # as a share of the highest rate
    seed: int = 1
    loss: LossRecipe = field(default_factory=LossRecipe)


class Optimiser:
    """Muon for the matrices, AdamW for the norms, one schedule for both."""

    def __init__(self, head: Head, recipe: Recipe) -> None:
        norms = [p for p in head.parameters() if p.ndim == 1]
        device = norms[0].device
        self._recipe = recipe
        self._matrix_rate, self._norm_rate = torch.zeros((), device=device), torch.zeros((), device=device)
        self._muon = Muon([p for p in head.parameters() if p.ndim == 2], recipe.matrix_decay)
        self._adamw = torch.optim.AdamW(
            norms, lr=self._norm_rate, betas=(0.9, 0.98), weight_decay=0.0, capturable=device.type == "cuda"
        )

    def schedule(self, step: int) -> None:
        """Set the rates of a step: a short warm-up, then a linear decay."""
        recipe = self._recipe
        share = min(1.0, (step + 1) / recipe.warm_up) * (1 - (1 - recipe.final_rate) * step / recipe.steps)
        self._matrix_rate.fill_(recipe.matrix_rate * share)
        self._norm_rate.fill_(recipe.norm_rate * share)

    def step(self) -> None:
        self._muon.step(self._matrix_rate)
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Any]:
        return {"muon": self._muon.state(), "adamw": self._adamw.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        self._muon.restore(state["muon"])
        self._adamw.load_state_dict(state["adamw"])
        for group in self._adamw.param_groups:
            group["lr"] = self._norm_rate


class Steps:
    """Takes training steps. On a GPU each width of batch has its own CUDA graph."""

    def __init__(self, step: Callable[[int, Tensor], None], device: torch.device) -> None:
        self._step, self._device = step, device
        self._rows: dict[int, Tensor] = {}  # input buffer of the graph of a width
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._num_taken: Counter[int] = Counter()
        self._side = torch.cuda.Stream() if device.type == "cuda" else None

    def take(self, group: Group) -> None:
        width = group.width
        if self._device.type != "cuda":
            self._step(width, group.rows)
            return
        rows = self._rows.setdefault(width, torch.empty_like(group.rows, device=self._device))
        rows.copy_(group.rows.pin_memory(), non_blocking=True)
        self._num_taken[width] += 1
        if self._num_taken[width] <= EAGER_STEPS:
            self._take_eagerly(width)
            return
        if width not in self._graphs:
            self._capture(width)
        self._graphs[width].replay()

    def _take_eagerly(self, width: int) -> None:
        """On a side stream: the warm-up before a capture requires one."""
        assert self._side is not None
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            self._step(width, self._rows[width])
        torch.cuda.current_stream().wait_stream(self._side)

    def _capture(self, width: int) -> None:
        pool = next(iter(self._graphs.values())).pool() if self._graphs else None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self._step(width, self._rows[width])
        self._graphs[width] = graph


class Trainer:
    def __init__(self, head: Head, trunk: Trunk, draft_ids: Tensor, recipe: Recipe) -> None:
        self.head, self.recipe, self.step_index = head, recipe, 0
        self._embedding = trunk.embedding
        self._dtype = torch.bfloat16 if trunk.device.type == "cuda" else torch.float32
        self._depths = len(recipe.loss.depth_weights)
        self._loss = DraftLoss(trunk.embedding, draft_ids, recipe.loss, recipe.targets_per_step, recipe.seed)
        self._optimiser = Optimiser(head, recipe)
        self._sums = torch.zeros(self._depths, 4, device=trunk.device)  # of the measurements of DraftLoss
        self._num = torch.zeros((), device=trunk.device)  # of targets in the sums

    def run(self, data: TrainingData, checkpoint: Path | None = None) -> None:
        """Train from the current step to the last."""
        recipe, first, began = self.recipe, self.step_index, time.monotonic()
        steps = Steps(lambda width, rows: self._step(data.batch(width, rows)), self._embedding.device)
        for index, group in enumerate(endless(data, recipe.seed)):
            if index < first:
                continue
            if index >= recipe.steps:
                return
            self._loss.sample_others(index)
            self._optimiser.schedule(index)
            steps.take(group)
            self.step_index = index + 1
            if self.step_index % REPORT_EVERY == 0:
                self._report("train", (time.monotonic() - began) / (self.step_index - first))
            if checkpoint is not None and self.step_index % CHECKPOINT_EVERY == 0:
                self.save(checkpoint)

    def _step(self, batch: Batch) -> None:
        drafts = self._drafts(batch)
        gradients, sums = self._loss(drafts, batch.teacher(), batch.is_valid, batch.follows())
        torch.autograd.backward(drafts, gradients)
        self._optimiser.step()
        self._sums += sums
        self._num += batch.is_valid.sum()

    def _drafts(self, batch: Batch) -> list[Tensor]:
        embedded = self._embedding[batch.token_ids]
        return batch.drafts(self.head(embedded, batch.hidden, self._depths, self._dtype))

    @torch.no_grad()
    def validate(self, data: TrainingData, name: str) -> None:
        """Report on conversations that are not in the training data."""
        self._sums.zero_(), self._num.zero_()
        self._loss.sample_others(self.step_index)
        for group in data.epoch(seed=0):
            batch = data.batch(group.width, group.rows.to(self._embedding.device))
            drafts = self._drafts(batch)
            self._sums += self._loss(drafts, batch.teacher(), batch.is_valid, batch.follows())[1]
            self._num += batch.is_valid.sum()
        self._report(name)

    def _report(self, name: str, seconds: float | None = None) -> None:
        """Print means since the last report: KL, hits, and acceptance given the drafts before."""
        divergence, hits, accepted, reached = self._sums.T
        columns = (divergence / self._num, hits / self._num, accepted / reached.clamp(min=1))
        shown = (" ".join(f"{x:.4f}" for x in column.tolist()) for column in columns)
        text = "KL {}  hits {}  accepted {}".format(*shown)
        pace = "" if seconds is None else f"  {1000 * seconds:.1f} ms a step"
        print(f"{name:>16} {self.step_index:6}  {text}{pace}", flush=True)
        is_finite = math.isfinite(float(divergence.sum()))
        self._sums.zero_(), self._num.zero_()
        if not is_finite:
            raise FloatingPointError("the loss is no longer finite")

    def save(self, file: Path) -> None:
        state = {
            "step": self.step_index,
            "head": self.head.state_dict(),
            "optimiser": self._optimiser.state(),
        }
        torch.save(state, file.with_suffix(".part"))
        file.with_suffix(".part").replace(file)

    def restore(self, file: Path) -> None:
        state = torch.load(file, map_location=self._embedding.device)
        self.head.load_state_dict(state["head"])
        self._optimiser.restore(state["optimiser"])
        self.step_index = state["step"]


def first_head(args: argparse.Namespace, trunk: Trunk, conversations: Conversations) -> tuple[Head, Tensor]:
    """The head before training, and its draft vocabulary."""
    draft_ids = most_used(conversations, trunk.shape.vocab_size)
    weights = trunk_weights(args.model)
    if args.start is None:
        head = Head(trunk.shape)
        head.start_from(weights, RESIDUAL_RMS)
        head.to(trunk.device)
    else:
        head, own_ids = load_head(args.start, trunk.shape, trunk.device)
        if args.keep_draft_ids and own_ids is not None:
            draft_ids = own_ids
    while len(head.layers) < args.layers:
        head.add_layer(weights)
    return head, draft_ids


def trunk_weights(folder: Path) -> dict[str, Tensor]:
    stored = load_file(folder / "model.safetensors")
    quantisation = json.loads((folder / "config.json").read_text()).get("quantization", {})
    return dequantised(stored, quantisation)


def most_used(conversations: Conversations, vocab_size: int) -> Tensor:
    """The draft vocabulary: the ids whose answers occur in the most conversations, most used first.

    The count is of conversations, not of tokens: a word that one answer repeats must not displace a word that
    many answers need.
    """
    spoken = conversations.is_target
    ids = conversations.token_ids[spoken].long()
    numbers = torch.arange(len(conversations), device=ids.device).repeat_interleave(conversations.lengths)
    used = (numbers[spoken] * vocab_size + ids).unique() % vocab_size
    order = torch.bincount(used, minlength=vocab_size).argsort(descending=True, stable=True)
    chosen = order[:NUM_DRAFT_IDS]
    covered = torch.isin(ids, chosen).float().mean()
    print(f"draft vocabulary: {NUM_DRAFT_IDS} ids, {float(covered):.2%} of the assistant's tokens")
    return chosen


def split_off(conversations: Conversations, num: int, seed: int) -> tuple[Conversations, Conversations]:
    """(the other conversations, `num` random conversations)"""
    order = torch.randperm(len(conversations), generator=torch.Generator().manual_seed(seed))
    held = torch.zeros(len(conversations), dtype=torch.bool)
    held[order[: min(num, len(order) // 4)]] = True
    held = held.to(conversations.starts.device)
    return conversations.select(~held), conversations.select(held)


def provenance(folder: Path, recipe: Recipe, start: Path | None) -> dict[str, str]:
    """Metadata of the head file. `earlier_recipes`: the recipes of the heads from which training started."""
    origin = json.loads((folder / "origin.json").read_text())
    found = {"trunk": origin["name"], "trunk_sha256": origin["sha256"], "recipe": json.dumps(asdict(recipe))}
    if start is not None:
        with safe_open(start, "pt") as file:
            before = file.metadata() or {}
        earlier = [*json.loads(before.get("earlier_recipes", "[]")), json.loads(before.get("recipe", "null"))]
        found["earlier_recipes"] = json.dumps(earlier)
    return found


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("model", type=Path, help="a converted model folder")
    parser.add_argument("conversations", type=Path, help="a file of synthesise.py")
    parser.add_argument("out", type=Path, help="the head file to write")
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--layers", type=int, default=1, help="decoder layers of the head (default: 1)")
    parser.add_argument("--matrix-rate", type=float, default=Recipe.matrix_rate)
    parser.add_argument("--norm-rate", type=float, default=Recipe.norm_rate)
    parser.add_argument("--matrix-decay", type=float, default=Recipe.matrix_decay)
    parser.add_argument("--hard", type=float, default=LossRecipe.hard)
    parser.add_argument("--overlap", type=float, default=LossRecipe.overlap)
    parser.add_argument("--unreached", type=float, default=LossRecipe.unreached)
    parser.add_argument("--targets-per-step", type=int, default=Recipe.targets_per_step)
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument(
        "--start", type=Path, help="a head file to start from instead of the trunk's last layer"
    )
    parser.add_argument(
        "--keep-draft-ids",
        action="store_true",
        help="use the draft ids of --start, not those of the conversations",
    )
    parser.add_argument("--resume", action="store_true", help="go on from OUT.checkpoint")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    trunk = load_trunk(args.model, device, torch.float16 if device == "cuda" else torch.float32)
    conversations = Conversations.load(args.conversations, device)
    training, validation = split_off(conversations, VALIDATION_CONVERSATIONS, args.seed)
    recipe = Recipe(
        steps=args.steps,
        targets_per_step=args.targets_per_step,
        matrix_rate=args.matrix_rate,
        matrix_decay=args.matrix_decay,
        norm_rate=args.norm_rate,
        seed=args.seed,
        loss=LossRecipe(hard=args.hard, overlap=args.overlap, unreached=args.unreached),
    )
    head, draft_ids = first_head(args, trunk, conversations)
    trainer = Trainer(head, trunk, draft_ids, recipe)
    checkpoint = args.out.with_suffix(".checkpoint")
    if args.resume and checkpoint.is_file():
        trainer.restore(checkpoint)
    data = TrainingData(training, trunk, recipe.targets_per_step)
    print(f"{len(training):,} conversations, {data.num_targets:,} targets; {recipe}", flush=True)
    trainer.run(data, checkpoint)
    for name, chosen in (("greedy", validation.is_greedy), ("sampled", ~validation.is_greedy)):
        unseen = TrainingData(validation.select(chosen), trunk, recipe.targets_per_step)
        trainer.validate(unseen, f"unseen, {name}")
    trainer.head.save(args.out, draft_ids, provenance(args.model, recipe, args.start))


if __name__ == "__main__":
    main()
