"""The results of one cell (a server, with or without MTP, at a load, in a round), and figures of many cells.

Pure data. An answer is equal if its text is the one that the same server gives to the same question alone,
without MTP: greedy decoding has only one right answer.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.native_mtp.loads import Load
from outrider.bench.answer import Answer
from outrider.bench.statistics import Spread
from outrider.bench.workloads import Task


@dataclass(frozen=True)
class Cell:
    server: str
    has_mtp: bool
    load: Load
    round: int
    seconds: float  # from the first request to the end of the last answer
    num_tokens: int  # of the answers without an error, counted by the model's tokenizer
    num_answers: int  # and errors
    unequal: tuple[tuple[str, str], ...] = ()  # prompt and answer
    errors: tuple[str, ...] = ()  # one for each request that failed
    has_crashed: bool = False  # the server's process ended

    @property
    def num_equal(self) -> int:
        return self.num_answers - len(self.unequal) - len(self.errors)

    @property
    def tokens_per_s(self) -> float | None:
        """None if no request was answered."""
        return self.num_tokens / self.seconds if self.num_tokens and self.seconds > 0 else None

    @property
    def text(self) -> str:
        speed = "no answer" if self.tokens_per_s is None else f"{self.tokens_per_s:.0f} tokens/s"
        crashed = ", crashed" if self.has_crashed else ""
        counted = f"{self.num_equal} of {self.num_answers} equal, {len(self.errors)} errors{crashed}"
        return f"{speed}, {counted}"


@dataclass(frozen=True)
class Figures:
    """A server at a load, over all rounds."""

    with_mtp: Spread | None  # tokens/s
    plain: Spread | None
    ratio: Spread | None  # with MTP / plain, within a round
    equal_with_mtp: tuple[int, int]  # equal answers, all requests
    equal_plain: tuple[int, int]
    errors: Mapping[str, int]
    num_crashes: int


def unequal(
    tasks: Sequence[Task], answers: Sequence[Answer], alone: Mapping[str, str]
) -> tuple[tuple[str, str], ...]:
    """Prompts and answers that are not plain answers alone. `alone`: for each prompt the text of this one."""
    return tuple(
        (task.prompt, answer.text)
        for task, answer in zip(tasks, answers, strict=True)
        if answer.error is None and alone.get(task.prompt) != answer.text
    )


def figures(cells: Iterable[Cell], server: str, load: Load) -> Figures:
    own = [cell for cell in cells if (cell.server, cell.load) == (server, load)]
    drafting = [cell for cell in own if cell.has_mtp]
    plain = [cell for cell in own if not cell.has_mtp]
    return Figures(
        _speeds(drafting),
        _speeds(plain),
        Spread.of(ratios(drafting, plain)),
        _equal(drafting),
        _equal(plain),
        Counter(error for cell in own for error in cell.errors),
        sum(cell.has_crashed for cell in own),
    )


def ratios(cells: Iterable[Cell], others: Iterable[Cell]) -> list[float]:
    """tokens/s of `cells` over those of `others`, for each round that both have measured."""
    speeds = {cell.round: cell.tokens_per_s for cell in others}
    found = []
    for cell in cells:
        mine, theirs = cell.tokens_per_s, speeds.get(cell.round)
        if mine is not None and theirs is not None:
            found.append(mine / theirs)
    return found


def as_json(cell: Cell) -> dict[str, object]:
    return dataclasses.asdict(cell) | {"tokens_per_s": cell.tokens_per_s}


def _speeds(cells: Sequence[Cell]) -> Spread | None:
    return Spread.of([speed for cell in cells if (speed := cell.tokens_per_s) is not None])


def _equal(cells: Sequence[Cell]) -> tuple[int, int]:
    return sum(cell.num_equal for cell in cells), sum(cell.num_answers for cell in cells)
