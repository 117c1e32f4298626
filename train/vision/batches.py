"""Conversations about pictures, as token ids.

Owns how a picture and a question are written for the model (as the chat template writes them) and the stream
of batches that worker processes draw. Must not know about weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random

import numpy as np
import torch
from pictures import Scene, draw, patch_labels
from questions import Question, questions, with_opening
from scenes import SceneMaker, any_scene
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

# Ids of the vocabulary that the default model never met (their embeddings are all alike) get a new meaning.
FAKE_ID, GLOBAL_ID, IMAGE_ID = 14, 15, 16
END_OF_TURN_ID = 2
TOKENS_PER_PICTURE = 16
PICTURE_IDS = [FAKE_ID, GLOBAL_ID, *[IMAGE_ID] * TOKENS_PER_PICTURE, FAKE_ID]
DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
OTHER_SYSTEMS = ("You are a helpful assistant.", "You answer questions about pictures.", "Answer briefly.")
IGNORED = -100


@dataclass(frozen=True)
class Turn:
    question: Question
    picture_first: bool = True
    shows_picture: bool = True


@dataclass
class Batch:
    pixels: Tensor  # uint8 [pictures, SIZE, SIZE, 3]
    labels: Tensor  # int64 [pictures, 3, patches]
    token_ids: Tensor  # int64 [rows, T]; the pictures fill its IMAGE_IDs in order
    picture_at: Tensor  # int64 [pictures * TOKENS_PER_PICTURE]: where in the flat token_ids the IMAGE_IDs are
    answer_at: Tensor  # int64 [n]: where in the flat token_ids the next token belongs to an answer
    answers: Tensor  # int64 [n]: that next token
    row_of: Tensor  # int64 [n]: the row it is in

    def to(self, device: str) -> Batch:
        return Batch(*(part.to(device, non_blocking=True) for part in vars(self).values()))

    def pin_memory(self) -> Batch:
        return Batch(*(part.pin_memory() for part in vars(self).values()))


class Writer:
    """Conversations to token ids."""

    def __init__(self, tokenizer_file: Path) -> None:
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
        self.ids = lru_cache(maxsize=200_000)(lambda text: tokenizer.encode(text).ids)

    def conversation(self, turns: Sequence[Turn], system: str, width: int) -> tuple[list[int], list[int]]:
        """Ids and targets; turns that would reach beyond `width` are left out."""
        ids = list(self.ids(f"<|im_start|>system\n{system}<|im_end|>\n")) if system else []
        targets = [IGNORED] * len(ids)
        for turn in turns:
            text = self.ids(turn.question.text)
            parts: list[list[int]] = [text]
            if turn.shows_picture:
                parts = [PICTURE_IDS, text] if turn.picture_first else [text, PICTURE_IDS]
            asked = [*self.ids("<|im_start|>user\n"), *(token for part in parts for token in part)]
            asked += self.ids("<|im_end|>\n<|im_start|>assistant\n")
            answer = [*self.ids(turn.question.answer), END_OF_TURN_ID]
            if len(ids) + len(asked) + len(answer) + 1 > width:
                break
            after = self.ids("\n")
            targets += [IGNORED] * (len(asked) - 1) + answer + [IGNORED] * (1 + len(after))
            ids += asked + answer + after
            targets = targets[: len(ids)]
        return ids, targets


def collate(scenes: Sequence[Scene], rows: Sequence[tuple[list[int], list[int]]], width: int) -> Batch:
    token_ids = np.full((len(rows), width), END_OF_TURN_ID, dtype=np.int64)
    targets = np.full((len(rows), width), IGNORED, dtype=np.int64)
    for row, (ids, wanted) in enumerate(rows):
        token_ids[row, : len(ids)] = ids
        targets[row, : len(wanted)] = wanted
    labels = np.stack([patch_labels(scene) for scene in scenes]).reshape(len(scenes), 3, -1)
    pixels = np.stack([draw(scene) for scene in scenes])
    picture_at, answer_at = (np.flatnonzero(mask) for mask in (token_ids == IMAGE_ID, targets != IGNORED))
    assert len(picture_at) == len(scenes) * TOKENS_PER_PICTURE, "a picture has no place in its row"
    parts = (pixels, labels, token_ids, picture_at, answer_at, targets.flat[answer_at], answer_at // width)
    return Batch(*(torch.from_numpy(part) for part in parts))


class Lessons(IterableDataset[Batch]):
    """Endless batches for training; each worker has a stream of its own.

    A quarter of the rows show a second picture in their second turn. `several`: how many times as often
    as usual a picture shows several shapes.
    """

    def __init__(self, tokenizer_file: Path, rows: int, width: int, seed: str, several: int = 1) -> None:
        self._tokenizer_file, self._seed = tokenizer_file, seed
        self._rows, self._width, self._several = rows, width, several

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        maker = SceneMaker(f"{self._seed} {worker.id if worker else 0}")
        writer = Writer(self._tokenizer_file)
        while True:
            yield self._batch(maker, writer)

    def _batch(self, maker: SceneMaker, writer: Writer) -> Batch:
        scenes: list[Scene] = []
        rows = []
        for row in range(self._rows):
            shown = [any_scene(maker, self._several) for _ in range(2 if row < self._rows // 4 else 1)]
            scenes += shown
            rows.append(self._row(shown, maker, writer))
        return collate(scenes, rows, self._width)

    def _row(self, shown: list[Scene], maker: SceneMaker, writer: Writer) -> tuple[list[int], list[int]]:
        while True:
            ids, targets = self._conversation(shown, maker.random, writer)
            if ids.count(IMAGE_ID) == len(shown) * TOKENS_PER_PICTURE:  # else the second picture did not fit
                return ids, targets

    def _conversation(
        self, shown: list[Scene], random: Random, writer: Writer
    ) -> tuple[list[int], list[int]]:
        turns = []
        for scene in shown:
            asked = questions(scene, random)[: 4 if len(shown) == 1 else 1]
            for place, question in enumerate(asked):
                first = random.random() < 0.85
                question = with_opening(question, random) if random.random() < 0.5 else question
                turns.append(Turn(question, picture_first=first, shows_picture=place == 0))
        system = DEFAULT_SYSTEM if random.random() < 0.85 else random.choice(OTHER_SYSTEMS)
        return writer.conversation(turns, system, self._width)


def lessons(dataset: Lessons, workers: int) -> Iterator[Batch]:
    loader = DataLoader(
        dataset,
        batch_size=None,
        num_workers=workers,
        prefetch_factor=4 if workers else None,
        pin_memory=torch.cuda.is_available(),
    )
    return iter(loader)
