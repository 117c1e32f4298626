"""Who is measured: the contract between the rounds and what answers them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from outrider.bench.answer import Answer, DraftCounts
from outrider.bench.workloads import Task
from outrider.request import DraftDepth


@dataclass(frozen=True)
class Asking:
    """How a task is asked."""

    temperature: float
    max_tokens: int
    seed: int
    depth: DraftDepth | None  # None: the target knows nothing of depths
    turn: str = ""  # an engine shares prefixes within one turn of an arm only


class Target(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def can_draft(self) -> bool:
        """Whether depths can be asked for, so that drafts can be turned off."""
        ...

    @property
    def memory_source(self) -> str | None:
        """What `peak_bytes` counts; None: nothing."""
        ...

    def facts(self) -> dict[str, Any]:
        """What it says of itself, for the record."""
        ...

    async def ask(self, task: Task, asking: Asking) -> Answer:
        """One answer. What goes wrong with it is in the answer; nothing is raised."""
        ...

    async def draft_counts(self) -> DraftCounts | None:
        """Since it started; None: it does not tell."""
        ...

    def reset_peak(self) -> None: ...

    def peak_bytes(self) -> int | None:
        """The most memory since the reset."""
        ...


@dataclass(frozen=True)
class Arm:
    """One side of the comparison: a target, asked for drafts or not."""

    name: str
    target: Target
    depth: DraftDepth | None

    def depth_for(self, task: Task) -> DraftDepth | None:
        """A plain task never drafts."""
        return 0 if task.kind == "plain" and self.depth is not None else self.depth


def arms_of(targets: list[Target], depths: tuple[DraftDepth, ...]) -> list[Arm]:
    """Of a target that drafts: drafts off, and on at each depth; of any other: as it is."""
    found = []
    for target in targets:
        prefix = f"{target.name} " if len(targets) > 1 else ""
        if not target.can_draft:
            found.append(Arm(target.name, target, None))
            continue
        found.append(Arm(f"{prefix}off", target, 0))
        found += [Arm(prefix + _depth_name(depth), target, depth) for depth in depths]
    return found


def _depth_name(depth: DraftDepth) -> str:
    return "auto" if depth == "auto" else f"depth {depth}"
