"""Steps written by hand, for the observer of an engine."""

from __future__ import annotations

from outrider.api.operations.step_metrics import StepMetrics
from outrider.plan import RowPlan, RowResult, StepPlan, StepResult
from outrider.request import SamplingParams

PARAMS = SamplingParams()


def row(sequence_id: int, num_fed: int, num_drafts: int = 0, start: int = 10, num_prompt: int = 5) -> RowPlan:
    return RowPlan(
        sequence_id=sequence_id,
        slot=sequence_id,
        start=start,
        token_ids=[1] * num_fed,
        num_drafts=num_drafts,
        next_id=None,
        feeds_head=False,
        num_drafts_next=0,
        params=PARAMS,
        history=[1] * (start + num_fed),
        num_prompt=num_prompt,
    )


def step(metrics: StepMetrics, *rows: tuple[RowPlan, int], waiting: int = 0, cache: int = 0) -> None:
    plan = StepPlan(4, 256, (), (tuple(one for one, _ in rows),))
    result = StepResult(tuple(RowResult(one.sequence_id, (1,) * gained) for one, gained in rows))
    metrics.on_step(plan, result, 0.004, waiting, cache)
