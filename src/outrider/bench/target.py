"""Targets: what answers the benchmark's questions; and the variants in which a target is measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from outrider.bench.answer import Answer, DraftCounts
from outrider.bench.workloads import Task
from outrider.request import DraftDepth


@dataclass(frozen=True)
class RequestOptions:
    """Everything in a request but the task."""

    temperature: float
    max_tokens: int
    seed: int
    depth: DraftDepth | None  # None for a target that does not know depths
    cache_salt: str = ""  # the engine's requests share cached prefixes only if their salts are equal


class Target(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def can_draft(self) -> bool:
        """True if requests can set the draft depth, so that drafts can be turned off."""
        ...

    @property
    def memory_source(self) -> str | None:
        """The owner of the memory that `peak_bytes` counts; None if nothing is counted."""
        ...

    def facts(self) -> dict[str, Any]:
        """What the target reports about itself, for the record."""
        ...

    async def ask(self, task: Task, options: RequestOptions) -> Answer:
        """One answer. Raises nothing: an error is part of the answer."""
        ...

    async def draft_counts(self) -> DraftCounts | None:
        """Since the target started; None if the target does not report them."""
        ...

    def reset_peak(self) -> None: ...

    def peak_bytes(self) -> int | None:
        """The most memory since the reset."""
        ...


@dataclass(frozen=True)
class Variant:
    """One side of the comparison: a target at a draft depth."""

    name: str
    target: Target
    depth: DraftDepth | None

    def depth_for(self, task: Task) -> DraftDepth | None:
        """Plain tasks never draft."""
        return 0 if task.kind == "plain" and self.depth is not None else self.depth


def variants_of(targets: list[Target], depths: tuple[DraftDepth, ...]) -> list[Variant]:
    """Drafts off, and on at each depth; a target that cannot draft is one variant."""
    found = []
    for target in targets:
        prefix = f"{target.name} " if len(targets) > 1 else ""
        if not target.can_draft:
            found.append(Variant(target.name, target, None))
            continue
        found.append(Variant(f"{prefix}off", target, 0))
        for depth in depths:
            found.append(Variant(prefix + ("auto" if depth == "auto" else f"depth {depth}"), target, depth))
    return found
