"""Batches of conversations about images, and the worker processes that make them.

Must not know about weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import torch
from conversations import (
    DEFAULT_SYSTEM,
    END_OF_TURN_ID,
    IMAGE_ID,
    MOST_BRANCHES,
    OTHER_SYSTEMS,
    TOKENS_PER_PICTURE,
    Turn,
    Writer,
    Written,
)
from pictures import Scene, draw, patch_labels
from questions import KINDS, Question, every_question, questions, with_opening
from scenes import SceneMaker, any_scene, scene_of_few, scene_of_several
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

IGNORED = -100


@dataclass
class Batch:
    """Rows of conversations. The tensors have the same sizes in every batch of a stream."""

    pixels: Tensor  # uint8 [pictures, SIZE, SIZE, 3]
    labels: Tensor  # int64 [pictures, 3, patches]
    token_ids: Tensor  # int64 [rows, T]; the images take the places of IMAGE_ID in order
    positions: Tensor  # int64 [rows, T]
    parts: Tensor  # int64 [rows, T]: conversation * MOST_BRANCHES + branch
    picture_at: Tensor  # int64 [pictures * TOKENS_PER_PICTURE]: indices of IMAGE_ID in the flat token_ids
    answer_at: Tensor  # int64 [n]: indices in the flat token_ids whose next token belongs to an answer
    answers: Tensor  # int64 [n]: the next tokens; IGNORED is padding
    answer_of: Tensor  # int64 [n]: the number of the answer
    kinds: Tensor  # int64 [n]: the kind of the question, an index into KINDS

    def to(self, device: str) -> Batch:
        return Batch(*(part.to(device, non_blocking=True) for part in vars(self).values()))

    def copy_(self, other: Batch) -> None:
        for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True):
            mine.copy_(theirs, non_blocking=True)

    def pin_memory(self) -> Batch:
        return Batch(*(part.pin_memory() for part in vars(self).values()))


def collate(
    scenes: Sequence[Scene], rows: Sequence[Sequence[Written]], width: int, most_answers: int | None = None
) -> Batch:
    """A row may hold several conversations. Only the first `most_answers` tokens of answers are used."""
    token_ids = np.full((len(rows), width), END_OF_TURN_ID, dtype=np.int64)
    positions, parts = np.zeros_like(token_ids), np.zeros_like(token_ids)
    found: list[tuple[int, int, int, int]] = []  # at, token, answer, kind
    for row, conversations in enumerate(rows):
        begin = 0
        for place, written in enumerate(conversations, start=1):
            end = begin + len(written.token_ids)
            token_ids[row, begin:end] = written.token_ids
            positions[row, begin:end] = written.positions
            parts[row, begin:end] = np.array(written.branches) + place * MOST_BRANCHES
            for answer in written.answers:
                number = found[-1][2] + 1 if found else 0
                at, kind = row * width + begin + answer.at, KINDS.index(answer.kind)
                found += [(at + i, token, number, kind) for i, token in enumerate(answer.token_ids)]
            begin = end
    labels = np.stack([patch_labels(scene) for scene in scenes]).reshape(len(scenes), 3, -1)
    pixels = np.stack([draw(scene) for scene in scenes])
    picture_at = np.flatnonzero(token_ids == IMAGE_ID)
    assert len(picture_at) == len(scenes) * TOKENS_PER_PICTURE, "the rows have no place for one of the images"
    if most_answers is not None:
        found = found[:most_answers]
        found += [(0, IGNORED, most_answers - 1, 0)] * (most_answers - len(found))
    answers = np.array(found, dtype=np.int64).T.copy()
    arrays = (pixels, labels, token_ids, positions, parts, picture_at, *answers)
    return Batch(*(torch.from_numpy(array) for array in arrays))


@dataclass(frozen=True)
class Plan:
    """The number of rows of each kind in a batch. A row has `width` tokens."""

    several: int  # one image of several shapes, many questions
    few: int  # two images of one shape or a text, with questions
    talks: int  # a conversation about two images, and one of several turns
    width: int = 256
    tokens_per_row: int = 48  # most answer tokens per row, as an average over all rows

    @classmethod
    def of(cls, rows: int, share_of_several: float) -> Plan:
        talks = rows // 8
        several = round((rows - talks) * share_of_several)
        return cls(several, rows - talks - several, talks)

    @property
    def rows(self) -> int:
        return self.several + self.few + self.talks


class Lessons(IterableDataset[Batch]):
    """Endless batches for training. Each worker has its own stream."""

    def __init__(self, tokenizer_file: Path, plan: Plan, seed: str) -> None:
        self._tokenizer_file, self._plan, self._seed = tokenizer_file, plan, seed

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        maker = SceneMaker(f"{self._seed} {worker.id if worker else 0}")
        writer = Writer(self._tokenizer_file)
        while True:
            yield self.batch(maker, writer)

    def batch(self, maker: SceneMaker, writer: Writer) -> Batch:
        plan = self._plan
        scenes: list[Scene] = []
        rows: list[list[Written]] = []
        for _ in range(plan.several):
            scenes.append(scene_of_several(maker))
            rows.append([self._fan(scenes[-1], maker.random, writer, plan.width)])
        for _ in range(plan.few):
            shown = [scene_of_few(maker) for _ in range(2)]
            scenes += shown
            rows.append([self._fan(scene, maker.random, writer, plan.width // 2) for scene in shown])
        for _ in range(plan.talks):
            shown = [any_scene(maker) for _ in range(3)]
            scenes += shown
            rows.append([self._talk(part, maker.random, writer) for part in (shown[:2], shown[2:])])
        return collate(scenes, rows, plan.width, plan.rows * plan.tokens_per_row)

    def _fan(self, scene: Scene, random: Random, writer: Writer, width: int) -> Written:
        asked = [_maybe_opened(question, random) for question in every_question(scene, random)]
        return writer.fan(asked, _any_system(random), width)

    def _talk(self, shown: list[Scene], random: Random, writer: Writer) -> Written:
        while True:
            written = self._conversation(shown, random, writer)
            if written.token_ids.count(IMAGE_ID) == len(shown) * TOKENS_PER_PICTURE:  # all images fit
                return written

    def _conversation(self, shown: list[Scene], random: Random, writer: Writer) -> Written:
        """A conversation about two images in two turns, or about one image in up to four turns."""
        turns = []
        for scene in shown:
            asked = questions(scene, random)[: 4 if len(shown) == 1 else 1]
            for place, question in enumerate(asked):
                turns.append(Turn(_maybe_opened(question, random), random.random() < 0.5, place == 0))
        return writer.conversation(turns, _any_system(random), self._plan.width // 2)


def _maybe_opened(question: Question, random: Random) -> Question:
    return with_opening(question, random) if random.random() < 0.3 else question


def _any_system(random: Random) -> str:
    return DEFAULT_SYSTEM if random.random() < 0.85 else random.choice(OTHER_SYSTEMS)


def lessons(dataset: Lessons, workers: int) -> Iterator[Batch]:
    loader = DataLoader(
        dataset,
        batch_size=None,
        num_workers=workers,
        prefetch_factor=6 if workers else None,
        pin_memory=torch.cuda.is_available(),
    )
    return iter(loader)
