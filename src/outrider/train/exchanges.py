"""An exchange: a prompt and the model's answer as token ids. And the file that stores exchanges.

The file grows by one line for each conversation: a run that stops loses only unfinished conversations. Must
not know how exchanges are made, nor how they are used.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from outrider.train.errors import TrainingError
from outrider.train.output_files import write_text


@dataclass(frozen=True)
class Exchange:
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    is_finished: bool  # the answer ends with an end-of-text token; False: the answer was cut
    is_held_out: bool  # for evaluation only; always answered greedily

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.prompt_ids + self.answer_ids

    @property
    def num_targets(self) -> int:
        """Tokens of the answer that can be drafted: all but the first."""
        return max(0, len(self.answer_ids) - 1)


class ExchangeFile:
    """The conversations of one run by number. A conversation is a list of exchanges."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> dict[int, list[Exchange]]:
        try:
            lines = self._path.read_text().splitlines()
        except FileNotFoundError:
            return {}
        return dict(self._parsed(lines))

    def open_to_append(self) -> TextIO:
        """Open the file for more conversations. Drops a last line that an interrupted run left incomplete."""
        whole = self.read()
        write_text(self._path, "".join(line_of(number, exchanges) for number, exchanges in whole.items()))
        return open(self._path, "a", buffering=1)

    def _parsed(self, lines: list[str]) -> Iterator[tuple[int, list[Exchange]]]:
        for i, line in enumerate(lines):
            try:
                record = json.loads(line)
                yield int(record["number"]), [_exchange(one) for one in record["exchanges"]]
            except (KeyError, TypeError, ValueError) as error:
                if i == len(lines) - 1:
                    return  # the run stopped while it wrote this line
                raise TrainingError(
                    f"{self._path}, line {i + 1}, is damaged ({error!r}). Start afresh with --force."
                ) from error


def line_of(number: int, exchanges: Iterable[Exchange]) -> str:
    return json.dumps({"number": number, "exchanges": [asdict(one) for one in exchanges]}) + "\n"


def _exchange(record: dict) -> Exchange:
    return Exchange(
        tuple(record["prompt_ids"]),
        tuple(record["answer_ids"]),
        bool(record["is_finished"]),
        bool(record["is_held_out"]),
    )
