"""A controller that chooses anything it may: whatever it does, the tokens must be the same."""

from __future__ import annotations

import random
from collections.abc import Sequence

from outrider.request import MAX_DEPTH
from outrider.speculate.controller import DepthController, DraftRequest
from outrider.speculate.costs import CostTable, guessed_costs
from outrider.speculate.depth import DepthChoice
from outrider.speculate.prompt_costs import MeasuredPromptCosts, PromptCosts, PromptShape
from outrider.speculate.shapes import ShapePolicy


class RestlessShapes(ShapePolicy):
    """Pads now and then, for no reason."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(CostTable(guessed_costs()), few=False)
        self._rng = rng

    def decode_shape(self, num_rows: int, width: int, num_cells: int, num_slots: int) -> tuple[int, int]:
        wider = self._rng.randint(width, MAX_DEPTH + 1) if self._rng.random() < 0.2 else width
        more = self._rng.randint(num_rows, num_slots) if self._rng.random() < 0.4 else num_rows
        return more, wider

    def prefill_width(self, width: int) -> int:
        return width + (self._rng.randint(0, 16) if self._rng.random() < 0.2 else 0)


class RestlessPromptCosts(PromptCosts):
    """Finds any chunk cheap or dear: chunks have all sizes, and any prompts share a pass."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(MeasuredPromptCosts({16: 0.1, 64: 0.4}), padding_share=rng.choice((0.0, 1.0)))
        self._rng = rng

    def pass_s(self, shape: PromptShape) -> float:
        return self._rng.choice((0.0, 0.15, 1.0))


class RestlessController(DepthController):
    def __init__(self, seed: object) -> None:
        self._rng = random.Random(f"restless {seed}")
        super().__init__()
        self.shapes = RestlessShapes(self._rng)
        self.prompt_costs = RestlessPromptCosts(self._rng)
        self._draws = 0.5  # how often the head is wanted, in this stretch

    def choose(self, requests: Sequence[DraftRequest], num_cells: int, num_slots: int = 0) -> DepthChoice:
        if self._rng.random() < 0.2:
            self._draws = self._rng.choice((0.0, 0.1, 0.5, 1.0))
        feed, wanted = [], []
        for request in requests:
            which = self._rng.randrange(len(request.offers)) if request.offers else 0
            most = request.offers[which][1] if request.offers else 0
            feed.append(
                (
                    which,
                    min(most, request.fixed_depth)
                    if request.fixed_depth is not None
                    else self._rng.randint(0, most),
                )
            )
            free = self._rng.randint(0, request.max_drafts_next) if self._rng.random() < self._draws else 0
            wanted.append(
                min(request.fixed_depth, request.max_drafts_next) if request.fixed_depth is not None else free
            )
        return DepthChoice(tuple(feed), tuple(wanted))
