"""How often a draft is right, by what its drafter says about it: learnt from all drafts that were compared.

    head     the margin: by how much the draft's score exceeds the second best (see
             Sampler.sample_drafts_with_margins)
    ngram    the match: how many tokens before the draft equal those before the token that it copies

Both are sorted into classes. Rows that sample have classes of their own: their scores include the noise, and
their text repeats less. Pure Python.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

PRIOR_WEIGHT = 4.0  # comparisons that a first estimate is worth; from the ablation: 1 costs 0.8 %
# Of a class's counts, with every comparison in it: about 200 count. 100 and all are equal.
CLASS_DECAY = 0.995


class Classes(NamedTuple):
    limits: tuple[float, ...]  # between the classes
    first_chances: tuple[float, ...]  # of each class, before anything was compared


# As differences of logits. First chances of each class's own were no better.
MARGINS = Classes((0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), (0.7,) * 9)
# In tokens; docs/LOG.md, "What a lookup knows itself". Five classes were no better.
MATCHES = Classes((4, 10), (0.4, 0.6, 0.85))


@dataclass(slots=True)
class HeadYield:
    """What the head's first, second, .. draft brings a row: means over its steps."""

    tokens: list[float]  # that the draft brings
    fed: list[float]  # share of steps in which it is fed
    num_steps: int = 0  # that have been counted


class ConfidenceRecord:
    """For rows that take the best token and rows that sample: how many drafts of each class were right."""

    def __init__(self, classes: Classes) -> None:
        self._limits, self._first_chances = classes
        num = len(self._first_chances)
        self._compared = [[0.0] * num for _ in range(2)]
        self._right = [[0.0] * num for _ in range(2)]
        self._chances: list[tuple[float, ...] | None] = [None, None]  # until the next comparison
        self._mean_chance: float | None = None  # likewise
        self._yields: dict[bool, tuple[tuple[float, int], HeadYield]] = {}  # the last ones; likewise

    def chances(self, is_sampled: bool) -> tuple[float, ...]:
        """The chance of each class."""
        found = self._chances[is_sampled]
        if found is None:
            right, compared = self._right[is_sampled], self._compared[is_sampled]
            found = tuple(map(_estimate, right, compared, self._first_chances))
            self._chances[is_sampled] = found
        return found

    @property
    def mean_chance(self) -> float:
        """Of a draft about which nothing is known yet."""
        if self._mean_chance is None:
            compared, right = (sum(map(sum, counts)) for counts in (self._compared, self._right))
            first = sum(self._first_chances) / len(self._first_chances)
            self._mean_chance = _estimate(right, compared, first)
        return self._mean_chance

    def expected_yield(self, min_chance: float, num: int, is_sampled: bool) -> HeadYield:
        """Of `num` drafts, of which those are fed that have at least `min_chance`. The caller's own."""
        key, known = (min_chance, num), self._yields.get(is_sampled)
        if known is None or known[0] != key:
            known = self._yields[is_sampled] = key, self._expected_yield(min_chance, num, is_sampled)
        found = known[1]
        return HeadYield([*found.tokens], [*found.fed])

    def _expected_yield(self, min_chance: float, num: int, is_sampled: bool) -> HeadYield:
        compared, chances = self._compared[is_sampled], self.chances(is_sampled)
        weights = [each + PRIOR_WEIGHT / len(chances) for each in compared]
        before, expected = 1.0, HeadYield([], [])
        for _ in range(num):
            fed = [
                (before * chance, weight)
                for chance, weight in zip(chances, weights, strict=True)
                if before * chance >= min_chance
            ]
            expected.tokens.append(sum(chance * weight for chance, weight in fed) / sum(weights))
            expected.fed.append(sum(weight for _, weight in fed) / sum(weights))
            before *= self.mean_chance
        return expected

    def all_right(self, confidence: Sequence[float], is_sampled: bool) -> list[float]:
        """For j = 1.. the chance that drafts 1..j are all right."""
        chances, all_right, found = self.chances(is_sampled), 1.0, []
        for each in confidence:
            all_right *= chances[bisect_right(self._limits, each)]
            found.append(all_right)
        return found

    def add(self, confidence: Sequence[float], num_right: int, is_sampled: bool) -> None:
        """Drafts with this confidence were compared: the first `num_right` were right, the next one wrong."""
        compared, right = self._compared[is_sampled], self._right[is_sampled]
        for i, each in enumerate(confidence[: num_right + 1]):
            kind = bisect_right(self._limits, each)
            compared[kind] = compared[kind] * CLASS_DECAY + 1
            right[kind] = right[kind] * CLASS_DECAY + (i < num_right)
        self._chances[is_sampled] = self._mean_chance = None
        self._yields.clear()

    def as_json(self) -> list[list[list[float]]]:
        return [[[round(x, 2) for x in counts] for counts in both] for both in (self._compared, self._right)]

    @classmethod
    def from_json(cls, data: object, classes: Classes) -> ConfidenceRecord:
        """Raise ValueError or TypeError for data that `as_json` cannot have made."""
        made = cls(classes)
        compared, right = ([[float(x) for x in counts] for counts in both] for both in data)  # type: ignore[attr-defined]
        for each_compared, each_right in zip(compared, right, strict=True):
            if len(each_compared) != len(classes.first_chances) or not all(
                0 <= r <= c < 1e6 for r, c in zip(each_right, each_compared, strict=True)
            ):
                raise ValueError("a record of drafts has other classes, or more right drafts than drafts")
        if len(compared) != 2:
            raise ValueError("a record of drafts needs the counts of greedy and of sampled rows")
        made._compared, made._right = compared, right
        return made


def _estimate(num_right: float, num_compared: float, first: float) -> float:
    return (num_right + PRIOR_WEIGHT * first) / (num_compared + PRIOR_WEIGHT)
