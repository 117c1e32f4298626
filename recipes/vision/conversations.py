"""Conversations about images as token ids, in the form of the chat template.

Must not know how scenes are made, nor about batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from questions import Question
from tokenizers import Tokenizer

# Ids that the default model was never trained on (their embeddings are all equal) get a new meaning.
FAKE_ID, GLOBAL_ID, IMAGE_ID = 14, 15, 16
END_OF_TURN_ID = 2
TOKENS_PER_PICTURE = 16
PICTURE_IDS = [FAKE_ID, GLOBAL_ID, *[IMAGE_ID] * TOKENS_PER_PICTURE, FAKE_ID]
DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
OTHER_SYSTEMS = ("You are a helpful assistant.", "You answer questions about pictures.", "Answer briefly.")
MOST_BRANCHES = 64  # in a conversation, including its beginning


@dataclass(frozen=True)
class Turn:
    question: Question
    picture_first: bool = True
    shows_picture: bool = True


@dataclass(frozen=True)
class Answer:
    kind: str  # of the question
    at: int  # index of the token before the answer's first token
    token_ids: list[int]


@dataclass
class Written:
    """A conversation, or several conversations with one shared beginning."""

    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    branches: list[int] = field(default_factory=list)  # 0: the beginning; every branch attends to it
    answers: list[Answer] = field(default_factory=list)

    def add(self, token_ids: Sequence[int], position: int, branch: int) -> int:
        """Append the tokens. Returns the next position."""
        self.token_ids += token_ids
        self.positions += range(position, position + len(token_ids))
        self.branches += [branch] * len(token_ids)
        return position + len(token_ids)


class Writer:
    """Turns conversations into token ids."""

    def __init__(self, tokenizer_file: Path) -> None:
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
        self.ids = lru_cache(maxsize=200_000)(lambda text: tokenizer.encode(text).ids)

    def conversation(self, turns: Sequence[Turn], system: str, width: int) -> Written:
        """Stops before the first turn that does not fit into `width` tokens."""
        written = Written()
        position = written.add(self._system(system), 0, 0)
        for turn in turns:
            text = self.ids(turn.question.text)
            parts: list[list[int]] = [text]
            if turn.shows_picture:
                parts = [PICTURE_IDS, text] if turn.picture_first else [text, PICTURE_IDS]
            asked = [*self.ids("<|im_start|>user\n"), *(token for part in parts for token in part)]
            asked += self.ids("<|im_end|>\n<|im_start|>assistant\n")
            answer = [*self.ids(turn.question.answer), END_OF_TURN_ID]
            after = self.ids("\n")
            if position + len(asked) + len(answer) + len(after) > width:
                break
            written.answers.append(Answer(turn.question.kind, position + len(asked) - 1, answer))
            position = written.add([*asked, *answer, *after], position, 0)
        return written

    def fan(self, asked: Sequence[Question], system: str, width: int) -> Written:
        """One image and many questions, each in its own branch. Questions that do not fit are left out."""
        written = Written()
        begin = written.add(
            [*self._system(system), *self.ids("<|im_start|>user\n"), *PICTURE_IDS], position=0, branch=0
        )
        branch = 0
        for question in asked:
            text = [*self.ids(question.text), *self.ids("<|im_end|>\n<|im_start|>assistant\n")]
            answer = [*self.ids(question.answer), END_OF_TURN_ID]
            if len(written.token_ids) + len(text) + len(answer) > width:
                continue
            branch += 1
            written.answers.append(Answer(question.kind, len(written.token_ids) + len(text) - 1, answer))
            written.add([*text, *answer], begin, branch)
        return written

    def _system(self, system: str) -> list[int]:
        return list(self.ids(f"<|im_start|>system\n{system}<|im_end|>\n")) if system else []
