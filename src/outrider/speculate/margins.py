"""How often a draft of the head is right, by its margin: learnt from all drafts that were compared.

A margin is what the head itself says about a draft: by how much its score exceeds the second best (see
Sampler.sample_drafts_with_margins). Margins are sorted into classes. Rows that sample have classes of their
own, since their scores include the noise. Pure Python.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

LIMITS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # between the classes, as differences of logits
NUM_CLASSES = len(LIMITS) + 1
FIRST_CHANCE = 0.7  # of any draft to be right; one for each class of margins was no better
PRIOR_WEIGHT = 4.0  # comparisons that a first estimate is worth; from the ablation: 1 costs 0.8 %
# Of a class's counts, with every comparison in it: about 200 count. 100 and all are equal.
CLASS_DECAY = 0.995


@dataclass(slots=True)
class HeadYield:
    """What the head's first, second, .. draft brings a row: means over its steps."""

    tokens: list[float]  # that the draft brings
    fed: list[float]  # share of steps in which it is fed
    num_steps: int = 0  # that have been counted


class MarginRecord:
    """For rows that take the best token and rows that sample: how many drafts of each class were right."""

    def __init__(self) -> None:
        self._compared = [[0.0] * NUM_CLASSES for _ in range(2)]
        self._right = [[0.0] * NUM_CLASSES for _ in range(2)]
        self._chances: list[tuple[float, ...] | None] = [None, None]  # until the next comparison
        self._mean_chance: float | None = None  # likewise

    def chances(self, is_sampled: bool) -> tuple[float, ...]:
        """The chance of each class."""
        found = self._chances[is_sampled]
        if found is None:
            counts = zip(self._right[is_sampled], self._compared[is_sampled], strict=True)
            found = self._chances[is_sampled] = tuple(_estimate(*each) for each in counts)
        return found

    @property
    def mean_chance(self) -> float:
        """Of a draft whose margin is not known yet."""
        if self._mean_chance is None:
            compared, right = (sum(map(sum, counts)) for counts in (self._compared, self._right))
            self._mean_chance = _estimate(right, compared)
        return self._mean_chance

    def expected_yield(self, min_chance: float, num: int, is_sampled: bool) -> HeadYield:
        """Of `num` drafts, of which those are fed that have at least `min_chance`."""
        compared, chances = self._compared[is_sampled], self.chances(is_sampled)
        weights = [each + PRIOR_WEIGHT / NUM_CLASSES for each in compared]
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

    def all_right(self, margins: Sequence[float], is_sampled: bool) -> list[float]:
        """For j = 1.. the chance that drafts 1..j are all right."""
        chances, all_right, found = self.chances(is_sampled), 1.0, []
        for margin in margins:
            all_right *= chances[bisect_right(LIMITS, margin)]
            found.append(all_right)
        return found

    def add(self, margins: Sequence[float], num_right: int, is_sampled: bool) -> None:
        """Drafts with these margins were compared: the first `num_right` were right, the next one wrong."""
        compared, right = self._compared[is_sampled], self._right[is_sampled]
        for i, margin in enumerate(margins[: num_right + 1]):
            kind = bisect_right(LIMITS, margin)
            compared[kind] = compared[kind] * CLASS_DECAY + 1
            right[kind] = right[kind] * CLASS_DECAY + (i < num_right)
        self._chances[is_sampled] = self._mean_chance = None

    def as_json(self) -> list[list[list[float]]]:
        return [[[round(x, 2) for x in counts] for counts in both] for both in (self._compared, self._right)]

    @classmethod
    def from_json(cls, data: object) -> MarginRecord:
        """Raise ValueError or TypeError for data that `as_json` cannot have made."""
        made = cls()
        compared, right = ([[float(x) for x in counts] for counts in both] for both in data)  # type: ignore[attr-defined]
        for each_compared, each_right in zip(compared, right, strict=True):
            if len(each_compared) != NUM_CLASSES or not all(
                0 <= r <= c < 1e6 for r, c in zip(each_right, each_compared, strict=True)
            ):
                raise ValueError("a record of margins has other classes, or more right drafts than drafts")
        if len(compared) != 2:
            raise ValueError("a record of margins needs the counts of greedy and of sampled rows")
        made._compared, made._right = compared, right
        return made


def _estimate(num_right: float, num_compared: float) -> float:
    return (num_right + PRIOR_WEIGHT * FIRST_CHANCE) / (num_compared + PRIOR_WEIGHT)
