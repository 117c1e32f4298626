"""How often drafts are accepted: one record for each row, and one for the model, from which new rows start.

For every source of drafts and every position j a record estimates the chance that draft j equals the token
that the model commits there, given that drafts 1..j-1 did:

    chance(j) = (num_accepted(j) + weight * prior(j)) / (num_compared(j) + weight)

The counts decay, so a record follows the text. The prior of one record is the estimate of the next:

    row's own comparisons -> all rows' recent comparisons -> all rows' comparisons ever -> FIRST_GUESS

Every draft that is compared with a committed token counts, whether the trunk was fed the draft or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from outrider.request import MAX_DEPTH, SamplingParams
from outrider.speculate.confidence import MARGINS, MATCHES, Classes, ConfidenceRecord, HeadYield

Source = Literal["head", "ngram", "prediction", "forced"]
SourceClass = tuple[Source, int]  # a source and a temperature class
CLASSES: dict[Source, Classes] = {"head": MARGINS, "ngram": MATCHES}  # of drafters that say how sure they are
FALLIBLE_SOURCES: tuple[Source, ...] = ("head", "ngram", "prediction")  # forced drafts are always right

# Decays: the factor by which a position's counts shrink with every new comparison at that position. A decay d
# remembers about 1 / (1 - d) comparisons. The decays and the weights below were chosen with the simulator
# (tests/speculate), so that drafting stops soon after a text becomes harder, and comes back soon after.
ROW_DECAY = 0.92  # one row: 12 comparisons
RECENT_DECAY = 0.91  # all rows, recently: 11 comparisons
MODEL_DECAY = 0.999  # all rows, ever: 1000 comparisons
IDLE_DECAY = 0.97  # of a row's counts, for every step in which no row drafts: probes then count for more
ROW_PRIOR_WEIGHT = 2.0  # comparisons that the model's estimate is worth in a row's record
RECENT_PRIOR_WEIGHT = 6.0  # comparisons that the long record is worth in the recent one
GUESS_WEIGHT = 20.0  # comparisons that the first guess is worth in the long record
FIRST_GUESS: dict[Source, float] = {"head": 0.6, "ngram": 0.4, "prediction": 0.8}  # chosen by hand
TEMPERATURE_LIMITS = (0.0, 0.5, 1.0)  # upper ends of temperature classes: hotter text accepts fewer drafts


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

    def decay_all(self, factor: float) -> None:
        self.compared = [count * factor for count in self.compared]
        self.accepted = [count * factor for count in self.accepted]

    def chance(self, position: int, prior: float, weight: float) -> float:
        return (self.accepted[position] + weight * prior) / (self.compared[position] + weight)


class ModelAcceptance:
    """The acceptance that a new row of this model can expect, by source and temperature class.

    Two records of all rows' comparisons: a long one, which is stored between runs, and a recent one.
    """

    def __init__(self) -> None:
        self._long: dict[SourceClass, PositionCounts] = {}
        self._recent: dict[SourceClass, PositionCounts] = {}
        self._chances: dict[SourceClass, list[float]] = {}  # until the next comparison
        self.confidence = {source: ConfidenceRecord(classes) for source, classes in CLASSES.items()}

    def chances(self, source: Source, temperature_class: int) -> list[float]:
        """For every position: the chance that a draft is right if all drafts before it are."""
        key = (source, temperature_class)
        if key not in self._chances:
            long, recent = self._long.get(key), self._recent.get(key)
            estimate = FIRST_GUESS[source]
            chances = []
            for position in range(MAX_DEPTH):
                if long is not None:  # the prior of a position is the estimate of the position before it
                    estimate = long.chance(position, estimate, GUESS_WEIGHT)
                chances.append(
                    estimate if recent is None else recent.chance(position, estimate, RECENT_PRIOR_WEIGHT)
                )
            self._chances[key] = chances
        return self._chances[key]

    def add(self, source: Source, temperature_class: int, num_compared: int, num_accepted: int) -> None:
        key = (source, temperature_class)
        if key not in self._long:
            self._long[key] = PositionCounts(MODEL_DECAY)
        if key not in self._recent:
            self._recent[key] = PositionCounts(RECENT_DECAY)
        self._long[key].add(num_compared, num_accepted)
        self._recent[key].add(num_compared, num_accepted)
        self._chances.pop(key, None)

    def as_json(self) -> dict[str, object]:
        positions = [
            [source, hot, [round(x, 2) for x in counts.compared], [round(x, 2) for x in counts.accepted]]
            for (source, hot), counts in sorted(self._long.items())
        ]
        confidence = {source: record.as_json() for source, record in self.confidence.items()}
        return {"positions": positions, "confidence": confidence}

    @classmethod
    def from_json(cls, data: object) -> ModelAcceptance:
        """Raise KeyError, ValueError or TypeError for data that `as_json` cannot have made."""
        made = cls()
        for source, classes in CLASSES.items():
            stored = data["confidence"][source]  # type: ignore[index]
            made.confidence[source] = ConfidenceRecord.from_json(stored, classes)
        for source, hot, compared, accepted in data["positions"]:  # type: ignore[index]
            counts = PositionCounts(MODEL_DECAY)
            counts.compared, counts.accepted = _checked_counts(compared), _checked_counts(accepted)
            if source not in FALLIBLE_SOURCES or not 0 <= hot <= len(TEMPERATURE_LIMITS):
                raise ValueError(f"unknown acceptance record: source {source!r}, temperature class {hot!r}")
            if any(right > total for right, total in zip(counts.accepted, counts.compared, strict=True)):
                raise ValueError("an acceptance record has more accepted drafts than compared ones")
            made._long[source, hot] = counts
        return made


class RowAcceptance:
    """The acceptance record of one row, and when the row's head last drafted."""

    def __init__(self, model: ModelAcceptance, params: SamplingParams) -> None:
        self._model = model
        self._temperature_class = temperature_class(params.temperature)
        self._own: dict[Source, PositionCounts] = {}
        self.steps_since_head = 0  # steps since the head last drafted for this row
        self.is_probe = False  # the head's last draft is a probe: it is compared and never fed
        self.head_yield: HeadYield | None = None  # see per_draft.py; None: no step has been counted
        self.other_source: Source | None = None  # the drafter that last offered more than the head
        self.other_share = 0.0  # share of recent steps in which another drafter offered more than the head

    @property
    def is_sampled(self) -> bool:
        """True if the row samples its tokens, False if it takes the most likely ones."""
        return self._temperature_class > 0

    def add(
        self,
        source: Source,
        num_proposed: int,
        num_right: int,
        num_committed: int,
        confidence: Sequence[float] = (),
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
        self._model.add(source, self._temperature_class, num_compared, num_accepted)
        if confidence:
            self._model.confidence[source].add(confidence[:num_compared], num_accepted, self.is_sampled)

    def compare(
        self,
        source: Source,
        drafts: Sequence[int],
        committed: Sequence[int],
        num_certain: int = 0,
        confidence: Sequence[float] = (),
    ) -> None:
        """Compare a proposal with the committed tokens. A proposal with certain drafts teaches nothing."""
        if source != "forced" and num_certain == 0:
            self.add(source, len(drafts), num_matching(drafts, committed), len(committed), confidence)

    def count_step(self, is_head_idle: bool) -> None:
        """Count a step. `is_head_idle`: the head drafts for no row."""
        if is_head_idle and "head" in self._own:
            self._own["head"].decay_all(IDLE_DECAY)

    def chances(self, source: Source, num: int) -> list[float]:
        """For j = 1..num: the chance that drafts 1..j are all right."""
        if source == "forced":
            return [1.0] * num
        model_chances = self._model.chances(source, self._temperature_class)
        own = self._own.get(source)
        all_right, estimate, chances = 1.0, model_chances[0], []
        for position in range(num):
            # A row that does better than the model at one position is likely to do better at the next.
            prior = (model_chances[position] + estimate) / 2
            estimate = prior if own is None else own.chance(position, prior, ROW_PRIOR_WEIGHT)
            all_right *= estimate
            chances.append(all_right)
        return chances


def temperature_class(temperature: float) -> int:
    limits = (i for i, limit in enumerate(TEMPERATURE_LIMITS) if temperature <= limit)
    return next(limits, len(TEMPERATURE_LIMITS))


def num_matching(drafts: Sequence[int], committed: Sequence[int]) -> int:
    """The number of leading drafts that equal the committed tokens."""
    pairs = enumerate(zip(drafts, committed, strict=False))
    return next((i for i, (draft, token) in pairs if draft != token), min(len(drafts), len(committed)))


def _checked_counts(values: object) -> list[float]:
    counts = [float(value) for value in values]  # type: ignore[attr-defined]
    if len(counts) != MAX_DEPTH or not all(0 <= count < 1e6 for count in counts):
        raise ValueError(f"an acceptance record must have {MAX_DEPTH} counts, each from 0 to a million")
    return counts
