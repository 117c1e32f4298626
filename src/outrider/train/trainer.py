"""The trainer: steps, milestones and checkpoints of one run.

The trunk is frozen. Its hidden states are computed anew for each batch and are not stored. A run is a
sequence of TrainStates; each is a function of the state before. A run can therefore stop after any state and
go on later with the same result. Must not know where exchanges come from.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from outrider.models.heads import MTPHead, new_head
from outrider.models.trunk import Trunk
from outrider.progress import Listener, Progress, ignore
from outrider.train import checkpoint
from outrider.train.batches import Batch, batches_from, make_batch, split
from outrider.train.chain import chain_outputs
from outrider.train.checkpoint import Milestone, TrainState, Tree
from outrider.train.errors import Interrupted, TrainingError
from outrider.train.evaluate import evaluate
from outrider.train.exchanges import Exchange
from outrider.train.loss import BatchLoss, loss_and_gradients
from outrider.train.optimizer import new_optimizer, rate_factor, set_rate
from outrider.train.settings import TrainingSettings

NUM_MILESTONES = 10  # measurements of the head during a run; chosen by hand
MILESTONE_EXCHANGES = 32  # held-out exchanges that a measurement uses; chosen by hand
CHECKPOINT_EVERY_S = 60.0  # a killed run loses at most this much; chosen by hand
STAGE = "Training"

OnStep = Callable[[int, BatchLoss], None]


class Trainer:
    def __init__(
        self,
        trunk: Trunk,
        exchanges: Sequence[Exchange],
        held_out: Sequence[Exchange],
        settings: TrainingSettings,
        folder: Path,
        listener: Listener = ignore,
        on_step: OnStep = lambda step, loss: None,
    ) -> None:
        self._trunk = trunk
        self._exchanges = exchanges
        self._held_out = held_out[:MILESTONE_EXCHANGES]
        self._settings = settings
        self._folder = folder
        self._listener = listener
        self._on_step = on_step
        self._head = new_head(trunk)
        self._optimizer = new_optimizer()

    def run(self, state: TrainState) -> TrainState:
        """Train to the end. When the user stops the run, save a checkpoint and raise Interrupted."""
        self._head.update(state.head)
        if state.optimizer:
            self._optimizer.state = _copied(state.optimizer)
        saved_s = time.monotonic()
        batches = batches_from(state.step, self._exchanges, self._settings.batch_tokens, self._settings.seed)
        try:
            state = self._with_milestone(state, state.step == 0)
            while self._share_done(state) < 1:
                state = self._step(state, next(batches))
                if time.monotonic() - saved_s > CHECKPOINT_EVERY_S:
                    checkpoint.save(self._folder, state)
                    saved_s = time.monotonic()
        except KeyboardInterrupt:
            checkpoint.save(self._folder, state)
            raise Interrupted(f"after {state.step:,} training steps") from None
        return state

    # -- a step ------------------------------------------------------------------------------------------

    def _step(self, state: TrainState, exchanges: Sequence[Exchange]) -> TrainState:
        began_s = time.perf_counter()
        share_done = self._share_done(state)
        factor = rate_factor(state.step, share_done, self._settings.num_steps)
        set_rate(self._optimizer, factor * self._settings.learning_rate)
        batches = [make_batch(part, self._settings.depths) for part in split(exchanges)]
        loss, gradients = self._gradients(batches)
        if not math.isfinite(loss.total):
            raise TrainingError(
                f"The loss is not a number after {state.step:,} steps: try a smaller --learning-rate."
            )
        self._optimizer.update(self._head, gradients)
        mx.eval(self._head.parameters(), self._optimizer.state)
        after = replace(
            state,
            step=state.step + 1,
            head=_copied(self._head.parameters()),
            optimizer=_copied(self._optimizer.state),
            num_targets=state.num_targets + sum(batch.num_targets for batch in batches),
            trained_s=state.trained_s + time.perf_counter() - began_s,
        )
        is_due = int(share_done * NUM_MILESTONES) < int(self._share_done(after) * NUM_MILESTONES)
        after = self._with_milestone(after, is_due)
        self._on_step(after.step, loss)
        self._report(after, f"loss {loss.total:.2f}", after.milestones != state.milestones)
        return after

    def _gradients(self, batches: Sequence[Batch]) -> tuple[BatchLoss, Tree]:
        """Loss and gradients over all batches of a step. Each target has the same weight."""
        num_targets = sum(batch.num_targets for batch in batches)
        losses, total = [], None
        for batch in batches:
            share = batch.num_targets / num_targets
            loss, gradients = self._part_gradients(batch)
            weighted = tree_map(lambda one, share=share: share * one, gradients)
            total = weighted if total is None else tree_map(mx.add, total, weighted)
            mx.eval(total)
            losses.append(loss.times(share))
        return reduce(BatchLoss.plus, losses), total

    def _part_gradients(self, batch: Batch) -> tuple[BatchLoss, Tree]:
        """Compute the loss at the guesses, then carry its gradient from the guesses through the head."""
        trunk, depths = self._trunk, self._settings.depths
        hidden = trunk.inner(batch.token_ids)
        states = batch.at_targets(hidden)
        hidden = hidden.astype(mx.float32)
        embedded = trunk.embed(batch.token_ids).astype(mx.float32)
        guesses = batch.guesses(chain_outputs(self._head, hidden, embedded, depths))
        mx.eval(guesses, states)
        loss, at_guesses = loss_and_gradients(trunk, guesses, states, batch)

        def pulled(head: MTPHead) -> mx.array:
            again = batch.guesses(chain_outputs(head, hidden, embedded, depths))
            return sum(((a * b).sum() for a, b in zip(again, at_guesses, strict=True)), mx.zeros(()))

        _, gradients = nn.value_and_grad(self._head, pulled)(self._head)
        return loss, gradients

    # -- progress and milestones -------------------------------------------------------------------------

    def _share_done(self, state: TrainState) -> float:
        steps, seconds = self._settings.num_steps, self._settings.seconds
        return max(state.step / steps if steps else 0.0, state.trained_s / seconds if seconds else 0.0)

    def _with_milestone(self, state: TrainState, is_due: bool) -> TrainState:
        if not is_due:
            return state
        measured = evaluate(self._head, self._trunk, self._held_out, self._settings.depths)
        return replace(state, milestones=(*state.milestones, Milestone(state.step, measured)))

    def _report(self, state: TrainState, note: str, is_news: bool) -> None:
        if state.milestones:
            shares = state.milestones[-1].held_out.acceptance_rates
            note += f", accepted drafts {' '.join(f'{share:.0%}' for share in shares)}"
        steps, seconds = self._settings.num_steps, self._settings.seconds
        if steps is None or (seconds and state.trained_s / seconds > state.step / steps):
            progress = Progress(STAGE, state.trained_s, seconds or 0.0, "s", note, is_news)
        else:
            progress = Progress(STAGE, state.step, steps, "steps", note, is_news)
        self._listener(progress)


def _copied(tree: Tree) -> Tree:
    """The same arrays in new containers: updates of the head or the optimiser do not change the copy."""
    return tree_map(lambda array: array, tree)
