"""How often drafts are accepted: one record for each row, and one for the model, from which new rows start.

For every source of drafts and every position j a record estimates the chance that draft j equals the token
that the model commits there, given that drafts 1..j-1 did:

    chance(j) = (num_accepted(j) + weight * prior(j)) / (num_compared(j) + weight)

The counts decay, so a record follows the text. The prior of one record is the estimate of the next:

    row's own comparisons -> all rows' comparisons -> FIRST_CHANCE

Every draft that is compared with a committed token counts, whether the trunk was fed the draft or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from outrider.request import MAX_DEPTH, SamplingParams
from outrider.speculate.margins import FIRST_CHANCE, MODEL_DECAY, PRIOR_WEIGHT, HeadYield, MarginRecord

Source = Literal["head", "ngram", "prediction", "forced"]
SourceClass = tuple[Source, bool]  # a source, and whether rows sample: sampled text accepts fewer drafts
FALLIBLE_SOURCES: tuple[Source, ...] = ("head", "ngram", "prediction")  # forced drafts are always right

# Of a row's counts of a position, with every comparison at that position: 12 count. From the ablation: 0.84
# to 1 are equal in bursts. With 0.95 a row is slow to stop when its text becomes unpredictable.
ROW_DECAY = 0.92
# Comparisons that the model's estimate is worth. 1 to 4 are equal; without the row's own record 1 % is lost.
ROW_PRIOR_WEIGHT = 1.0


class PositionCounts:
    """Decayed counts of compared and of accepted drafts, by position."""

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self.compared = [0.0] * MAX_DEPTH
        self.accepted = [0.0] * MAX_DEPTH

    def add(self, num_compared: int, num_accepted: int) -> None:
        """Drafts 1..num_compared were compared. The first `num_accepted` were right, the next one was wrong.

        After a wrong draft the counts of all later positions decay too: the text has changed.
        """
        for i in range(num_compared if num_accepted == num_compared else MAX_DEPTH):
            self.compared[i] = self.compared[i] * self._decay + (i < num_compared)
            self.accepted[i] = self.accepted[i] * self._decay + (i < num_accepted)

    def chance(self, position: int, prior: float, weight: float) -> float:
        return (self.accepted[position] + weight * prior) / (self.compared[position] + weight)


class ModelAcceptance:
    """The acceptance that a new row of this model can expect. It is stored between runs."""

    def __init__(self) -> None:
        self._counts: dict[SourceClass, PositionCounts] = {}
        self._chances: dict[SourceClass, list[float]] = {}  # until the next comparison
        self.margins = MarginRecord()

    def chances(self, source: Source, is_sampled: bool) -> list[float]:
        """For every position: the chance that a draft is right if all drafts before it are."""
        key = (source, is_sampled)
        if key not in self._chances:
            counts, estimate, chances = self._counts.get(key), FIRST_CHANCE, []
            for position in range(MAX_DEPTH):
                if counts is not None:  # the prior of a position is the estimate of the position before it
                    estimate = counts.chance(position, estimate, PRIOR_WEIGHT)
                chances.append(estimate)
            self._chances[key] = chances
        return self._chances[key]

    def add(self, source: Source, is_sampled: bool, num_compared: int, num_accepted: int) -> None:
        key = (source, is_sampled)
        if key not in self._counts:
            self._counts[key] = PositionCounts(MODEL_DECAY)
        self._counts[key].add(num_compared, num_accepted)
        self._chances.pop(key, None)

    def as_json(self) -> dict[str, object]:
        positions = [
            [source, sampled, [round(x, 2) for x in counts.compared], [round(x, 2) for x in counts.accepted]]
            for (source, sampled), counts in sorted(self._counts.items())
        ]
        return {"positions": positions, "margins": self.margins.as_json()}

    @classmethod
    def from_json(cls, data: object) -> ModelAcceptance:
        """Raise KeyError, ValueError or TypeError for data that `as_json` cannot have made."""
        made = cls()
        made.margins = MarginRecord.from_json(data["margins"])  # type: ignore[index]
        for source, is_sampled, compared, accepted in data["positions"]:  # type: ignore[index]
            counts = PositionCounts(MODEL_DECAY)
            counts.compared, counts.accepted = _checked_counts(compared), _checked_counts(accepted)
            if source not in FALLIBLE_SOURCES or not isinstance(is_sampled, bool):
                raise ValueError(f"unknown acceptance record: source {source!r}, sampled {is_sampled!r}")
            if any(right > total for right, total in zip(counts.accepted, counts.compared, strict=True)):
                raise ValueError("an acceptance record has more accepted drafts than compared ones")
            made._counts[source, is_sampled] = counts
        return made


class RowAcceptance:
    """The acceptance record of one row, and when the row's head last drafted."""

    def __init__(self, model: ModelAcceptance, params: SamplingParams) -> None:
        self._model = model
        self.is_sampled = params.temperature > 0
        self._own: dict[Source, PositionCounts] = {}
        self.steps_since_head = 0  # steps since the head last drafted for this row
        self.is_probe = False  # the head's last draft is a probe: it is compared and never fed
        self.head_yield: HeadYield | None = None  # see per_draft.py; None: no step has been counted
        self.other_source: Source | None = None  # the drafter that last offered more than the head
        self.other_share = 0.0  # share of recent steps in which another drafter offered more than the head

    def add(
        self,
        source: Source,
        num_proposed: int,
        num_right: int,
        num_committed: int,
        margins: Sequence[float] = (),
    ) -> None:
        """Count a proposal. Its first `num_right` drafts equal the first of `num_committed` tokens."""
        # The committed tokens show nothing about the drafts after the first wrong one.
        num_compared = min(num_proposed, num_committed, num_right + 1)
        if num_compared == 0 or source == "forced":
            return
        num_accepted = min(num_right, num_compared)
        if source not in self._own:
            self._own[source] = PositionCounts(ROW_DECAY)
        self._own[source].add(num_compared, num_accepted)
        self._model.add(source, self.is_sampled, num_compared, num_accepted)
        self._model.margins.add(margins[:num_compared], num_accepted, self.is_sampled)

    def compare(
        self,
        source: Source,
        drafts: Sequence[int],
        committed: Sequence[int],
        num_certain: int = 0,
        margins: Sequence[float] = (),
    ) -> None:
        """Compare a proposal with the committed tokens. A proposal with certain drafts teaches nothing."""
        if source != "forced" and num_certain == 0:
            self.add(source, len(drafts), num_matching(drafts, committed), len(committed), margins)

    def chances(self, source: Source, num: int) -> list[float]:
        """For j = 1..num: the chance that drafts 1..j are all right."""
        if source == "forced":
            return [1.0] * num
        model_chances = self._model.chances(source, self.is_sampled)
        own = self._own.get(source)
        all_right, estimate, chances = 1.0, model_chances[0], []
        for position in range(num):
            # A row that does better than the model at one position is likely to do better at the next.
            prior = (model_chances[position] + estimate) / 2
            estimate = prior if own is None else own.chance(position, prior, ROW_PRIOR_WEIGHT)
            all_right *= estimate
            chances.append(all_right)
        return chances


def num_matching(drafts: Sequence[int], committed: Sequence[int]) -> int:
    """The number of leading drafts that equal the committed tokens."""
    pairs = enumerate(zip(drafts, committed, strict=False))
    return next((i for i, (draft, token) in pairs if draft != token), min(len(drafts), len(committed)))


def _checked_counts(values: object) -> list[float]:
    counts = [float(value) for value in values]  # type: ignore[attr-defined]
    if len(counts) != MAX_DEPTH or not all(0 <= count < 1e6 for count in counts):
        raise ValueError(f"an acceptance record must have {MAX_DEPTH} counts, each from 0 to a million")
    return counts
