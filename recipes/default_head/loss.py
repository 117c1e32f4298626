"""The loss: drafts should be the tokens that the trunk would sample itself.

At every depth the loss pulls the draft's distribution towards the trunk's, with extra weight on the best
token. The engine uses a draft at depth 2 only if the draft at depth 1 of the same chain was accepted. Deeper
losses therefore have full weight only there.

    targets:            t-2   t-1    t          depth d drafts them all, each from a chain of its own;
    chain from t-4:      1     2     3          depth 3 at t is reached if depth 1 hit t-2 and depth 2 hit t-1

The softmax runs over the draft vocabulary and a fresh random sample of the other ids. Each sampled id
represents many ids. This costs a third of the whole vocabulary, and the head still learns not to draft other
ids.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from kernels import distil
from torch import Tensor


@dataclass(frozen=True)
class LossRecipe:
    depth_weights: tuple[float, ...] = (1.0, 0.8, 0.64)
    hard: float = 0.15  # weight of the trunk's best token; the trunk's distribution has the rest
    overlap: float = 0.0  # weight of the mass that both distributions have in common
    unreached: float = 0.2  # weight of a deeper draft if an earlier draft of its chain was rejected
    num_sampled: int = 2048  # ids outside the draft vocabulary in each step's softmax


class DraftLoss:
    """Losses and their gradients, computed in buffers that all steps share."""

    def __init__(
        self, embedding: Tensor, draft_ids: Tensor, recipe: LossRecipe, num_targets: int, seed: int
    ) -> None:
        self._embedding = embedding
        self._recipe = recipe
        self._num_draft = len(draft_ids)
        is_other = torch.ones(len(embedding), dtype=torch.bool, device=embedding.device)
        is_other[draft_ids] = False
        self._others = is_other.nonzero()[:, 0]
        num_sampled = recipe.num_sampled if len(self._others) else 0
        self._columns = torch.cat([embedding[draft_ids], embedding[:num_sampled]])  # [columns, H]
        self._offsets = torch.zeros(len(self._columns), device=embedding.device)
        if num_sampled:
            self._offsets[self._num_draft :] = math.log(len(self._others) / num_sampled)
        self._target_logits = embedding.new_empty(num_targets, len(self._columns))
        self._draft_logits = torch.empty_like(self._target_logits)
        self._generator = torch.Generator(embedding.device)
        self._seed = seed << 32

    def sample_others(self, step: int) -> None:
        """Choose the ids outside the draft vocabulary for this step."""
        num = len(self._columns) - self._num_draft
        if num:
            self._generator.manual_seed(self._seed + step)
            device = self._others.device
            chosen = torch.randint(len(self._others), (num,), generator=self._generator, device=device)
            self._columns[self._num_draft :] = self._embedding[self._others[chosen]]

    @torch.no_grad()
    def __call__(
        self, drafts: list[Tensor], teacher: Tensor, is_valid: Tensor, follows: Tensor
    ) -> tuple[list[Tensor], Tensor]:
        """drafts [N, H] of each depth, teacher [N, H], is_valid and follows [N] (see Batch).

        Returns the gradients of the drafts, and sums over the valid targets [depths, 4]: KL, hits, accepted
        drafts and reached drafts.
        """
        columns, recipe = self._columns, self._recipe
        targets = torch.mm(teacher, columns.T, out=self._target_logits)
        reached = is_valid
        gradients, sums = [], []
        for draft, weight in zip(drafts, recipe.depth_weights, strict=True):
            logits = torch.mm(draft.to(teacher.dtype), columns.T, out=self._draft_logits)
            weights = torch.where(reached > 0, 1.0, recipe.unreached) * is_valid
            found = distil(logits, targets, self._offsets, recipe.hard, recipe.overlap, weights)
            gradients.append(torch.mm(logits, columns).float() * (weight / len(teacher)))
            accepted = found.hit * reached
            counted = [found.divergence @ is_valid, found.hit @ is_valid, accepted.sum(), reached.sum()]
            sums.append(torch.stack(counted))
            reached = accepted.roll(1) * follows * is_valid
        return gradients, torch.stack(sums)
