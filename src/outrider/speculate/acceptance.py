"""How often drafts stand, by source and place: one record a row, and one a model from which new rows start.

Pure Python, a few numbers each. A record holds, for every place j, how often draft j stood when all before it
had stood; old trials fade, so that a record follows the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from outrider.request import MAX_DEPTH, SamplingParams

Source = Literal["head", "ngram", "prediction", "forced"]
Key = tuple[Source, int]  # source and temperature class
SOURCES: tuple[Source, ...] = ("head", "ngram", "prediction")  # those that can be wrong

ROW_FADE = 0.92  # a trial's weight after the next one at its place
IDLE_FADE = 0.97  # and after a step in which all rows rest: what a few show by then counts for more
LATELY_FADE = 0.91
MODEL_FADE = 0.999
PRIOR_TRIALS = 2.0  # what the model's record weighs against a row's own trials
LATELY_TRIALS = 6.0  # what it weighs against all rows' latest ones
FIRST_GUESS: dict[Source, float] = {"head": 0.6, "ngram": 0.4, "prediction": 0.8}  # before anything is known
GUESS_TRIALS = 20.0  # what that guess weighs in a model's record
TEMPERATURE_CLASSES = (0.0, 0.5, 1.0)  # drafts stand less often in hotter text; a class ends at its number


class Places:
    """Decayed trials and successes by place."""

    def __init__(self, fade: float) -> None:
        self._fade = fade
        self.tried = [0.0] * MAX_DEPTH
        self.stood = [0.0] * MAX_DEPTH

    def add(self, num_tried: int, num_stood: int) -> None:
        """Drafts 1..num_tried were looked at: num_stood stood, and if that is fewer, the next one fell.

        What is known of the places after a fallen draft fades too: the text is not what it was.
        """
        for place in range(num_tried if num_stood == num_tried else MAX_DEPTH):
            self.tried[place] = self.tried[place] * self._fade + (place < num_tried)
            self.stood[place] = self.stood[place] * self._fade + (place < num_stood)

    def age(self, by: float) -> None:
        self.tried = [count * by for count in self.tried]
        self.stood = [count * by for count in self.stood]

    def chance(self, place: int, lean: float, lean_trials: float) -> float:
        """That a draft at this place stands, `lean` being worth so many trials."""
        return (self.stood[place] + lean_trials * lean) / (self.tried[place] + lean_trials)


def num_tried(num_proposed: int, num_right: int, num_committed: int) -> int:
    """How many of the proposed drafts the committed tokens tell about, whether they were fed or not."""
    return min(num_proposed, num_committed, num_right + 1)


class ModelAcceptance:
    """What a model's drafts are worth before a row has a record of its own, by temperature.

    Two records of all rows' trials: a long one, which is kept between runs, and on top of it the latest ones.
    """

    def __init__(self) -> None:
        self._records: dict[Key, Places] = {}
        self._lately: dict[Key, Places] = {}
        self._chances: dict[Key, list[float]] = {}  # until the next trial
        self.num_trials = 0  # of the head, that any row has added
        self.num_missed = 0  # in which its first draft fell

    def chances(self, source: Source, temperature_class: int) -> list[float]:
        """For every place, that a draft there stands if all before it did."""
        key = (source, temperature_class)
        chances = self._chances.get(key)
        if chances is None:
            chances = self._chances[key] = self._worked_out(key)
        return chances

    def _worked_out(self, key: Key) -> list[float]:
        record, lately = self._records.get(key), self._lately.get(key)
        guess = FIRST_GUESS[key[0]]
        chances = []
        for place in range(MAX_DEPTH):
            if record is not None:  # a place without trials is like the one before it
                guess = record.chance(place, guess, GUESS_TRIALS)
            chances.append(guess if lately is None else lately.chance(place, guess, LATELY_TRIALS))
        return chances

    def add(self, source: Source, temperature_class: int, num_tried: int, num_stood: int) -> None:
        key = (source, temperature_class)
        if key not in self._records:
            self._records[key] = Places(MODEL_FADE)
        if key not in self._lately:
            self._lately[key] = Places(LATELY_FADE)
        self.num_trials += source == "head"
        self.num_missed += source == "head" and num_stood == 0
        self._records[key].add(num_tried, num_stood)
        self._lately[key].add(num_tried, num_stood)
        self._chances.pop(key, None)

    def as_json(self) -> list[list[object]]:
        return [
            [source, hot, [round(x, 2) for x in places.tried], [round(x, 2) for x in places.stood]]
            for (source, hot), places in sorted(self._records.items())
        ]

    @classmethod
    def from_json(cls, data: object) -> ModelAcceptance:
        """Raises ValueError or TypeError for anything that `as_json` cannot have made."""
        made = cls()
        for source, hot, tried, stood in data:  # type: ignore[attr-defined]
            places = Places(MODEL_FADE)
            places.tried, places.stood = _counts(tried), _counts(stood)
            if source not in SOURCES or not 0 <= hot <= len(TEMPERATURE_CLASSES):
                raise ValueError(f"no such record: {source}, {hot}")
            if any(good > all_ for good, all_ in zip(places.stood, places.tried, strict=True)):
                raise ValueError("more drafts stood than were tried")
            made._records[source, hot] = places
        return made


class RowAcceptance:
    """One row's record, leaning on the model's where it has few trials of its own."""

    def __init__(self, model: ModelAcceptance, params: SamplingParams) -> None:
        self._model = model
        self._class = temperature_class(params.temperature)
        self.since_head = 0  # steps since the head last made a draft for the row
        self.on_trial = False  # that was to see what it is worth, not to draft with it
        self.other: Source | None = None  # the drafter beside the head that last offered more than it
        self.other_share = 0.0  # of the steps, lately, in which one did
        self._own: dict[Source, Places] = {}

    @property
    def draws(self) -> bool:
        """Whether the row draws its tokens, instead of taking the best."""
        return self._class > 0

    def add(self, source: Source, num_proposed: int, num_right: int, num_committed: int) -> None:
        """A source proposed drafts for a step that brought `num_committed` tokens; `num_right` were right."""
        tried = num_tried(num_proposed, num_right, num_committed)
        if tried == 0 or source == "forced":
            return
        if source not in self._own:
            self._own[source] = Places(ROW_FADE)
        self._own[source].add(tried, min(num_right, tried))
        self._model.add(source, self._class, tried, min(num_right, tried))

    def note_head(self, drafts: bool, all_rest: bool) -> None:
        """A step in which the head drafts for this row, or does not, or does for none of the batch."""
        self.since_head = 0 if drafts else self.since_head + 1
        if all_rest and "head" in self._own:
            self._own["head"].age(IDLE_FADE)

    def compare(
        self, source: Source, drafts: Sequence[int], committed: Sequence[int], num_sure: int = 0
    ) -> None:
        """Hold a proposal against the tokens that came; drafts that were certain say nothing."""
        if source != "forced" and num_sure == 0:
            self.add(source, len(drafts), num_right(drafts, committed), len(committed))

    def chances(self, source: Source, num: int) -> list[float]:
        """That drafts 1..j all stand, for j = 1..num."""
        if source == "forced":
            return [1.0] * num
        prior = self._model.chances(source, self._class)
        own = self._own.get(source)
        all_stand, before, chances = 1.0, prior[0], []
        for place in range(num):
            # Where this row does better or worse than usual at one place, so will it at the next.
            lean = (prior[place] + before) / 2
            before = lean if own is None else own.chance(place, lean, PRIOR_TRIALS)
            all_stand *= before
            chances.append(all_stand)
        return chances


def temperature_class(temperature: float) -> int:
    hotter = (i for i, limit in enumerate(TEMPERATURE_CLASSES) if temperature <= limit)
    return next(hotter, len(TEMPERATURE_CLASSES))


def num_right(proposed: Sequence[int], committed: Sequence[int]) -> int:
    """How many leading drafts equal the tokens that came."""
    pairs = enumerate(zip(proposed, committed, strict=False))
    return next((i for i, (draft, token) in pairs if draft != token), min(len(proposed), len(committed)))


def _counts(values: object) -> list[float]:
    counts = [float(value) for value in values]  # type: ignore[attr-defined]
    if len(counts) != MAX_DEPTH or not all(0 <= count < 1e6 for count in counts):
        raise ValueError("not a record of trials")
    return counts
