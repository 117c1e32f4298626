"""A runner that computes nothing: it plays the text of a script, under each row's grammar.

Scheduler, template, tokenizer, grammars, parsers, prefix cache and drafts are the server's own. A token of
the script that the grammar forbids is reported, and the answer then ends as soon as the grammar lets it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from outrider.plan import (
    CacheGeometry,
    PrefixCopies,
    RowPlan,
    RowResult,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from outrider.prompt_media import MediaPiece

BYTES_PER_CELL = 64  # as of a tiny model
MAX_LOST = 200  # tokens that a grammar may still want before an answer that left the script fails
MAX_PIECE = 64  # bytes of the longest token that is tried
OFF_SCRIPT_FILE = "off_script.txt"  # beside the script

Play = Callable[[str], str]  # the answer to a prompt
Report = Callable[[str], None]


def _bytes_of_characters() -> dict[str, int]:
    """How byte-level vocabularies write bytes: printable ones as themselves, the others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class Pieces:
    """A byte-level tokenizer's tokens as bytes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        to_byte = _bytes_of_characters()
        added = {i: token.content.encode() for i, token in tokenizer.added_tokens_decoder.items()}
        names = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        plain = (
            bytes(map(to_byte.__getitem__, name)) if i not in added else b"" for i, name in enumerate(names)
        )
        self.of_id = [added.get(i, piece) for i, piece in enumerate(plain)]
        self.end_id: int = tokenizer.eos_token_id

    @cached_property
    def ids(self) -> dict[bytes, int]:
        return {piece: i for i, piece in enumerate(self.of_id)}

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self.of_id[i] for i in ids).decode(errors="replace")


class Part:
    """One answer of the script, as tokens."""

    def __init__(self, text: str, pieces: Pieces) -> None:
        self._pieces = pieces
        self._bytes = text.encode()
        self._usual: dict[
            int, int
        ] = {}  # the token at each place, in bytes, if the answer is tokenized as usual
        place = 0
        for token_id in pieces.encode(text):
            self._usual[place] = token_id
            place += len(pieces.of_id[token_id])

    def next_id(self, generated: Sequence[int], allowed: Callable[[int], bool]) -> int | None:
        """The token after `generated`; None if no allowed token continues the script."""
        said = b"".join(self._pieces.of_id[i] for i in generated)
        if not self._bytes.startswith(said):
            return None
        if len(said) == len(self._bytes):
            return self._pieces.end_id if allowed(self._pieces.end_id) else None
        usual = self._usual.get(len(said))
        if usual is not None and allowed(usual):
            return usual
        rest = self._bytes[len(said) : len(said) + MAX_PIECE]
        found = (self._pieces.ids.get(rest[:n]) for n in range(len(rest), 0, -1))
        return next((i for i in found if i is not None and allowed(i)), None)


@dataclass(frozen=True)
class Played:
    result: StepResult
    is_first_trace: bool = False
    is_as_planned: bool = True


class ScriptedRunner:
    image_embeddings: Any = None  # it reads no images
    has_head = False
    compiles = False

    def __init__(self, pieces: Pieces, play: Play, report: Report) -> None:
        self._pieces = pieces
        self._play = play
        self._report = report
        self._geometry = CacheGeometry(BYTES_PER_CELL)
        self._num_slots = self._capacity = 0
        self._blocks: dict[int, int] = {}  # cells of each cached block
        self._parts: dict[int, Part] = {}  # by sequence
        self._num_lost: Counter[int] = Counter()  # tokens after the script was left, by sequence

    @property
    def num_bytes(self) -> int:
        return self._geometry.num_bytes(self._num_slots, self._capacity)

    @property
    def prefix_bytes(self) -> int:
        return sum(self._blocks.values()) * BYTES_PER_CELL

    def geometry(self, capacity_step: int) -> CacheGeometry:
        self._geometry = CacheGeometry(BYTES_PER_CELL, capacity_step=capacity_step)
        return self._geometry

    def run(self, plan: StepPlan) -> StepResult:
        return self.finish(self.launch(plan))

    def launch(self, plan: StepPlan, previous: Played | None = None) -> Played:
        assert previous is None, "steps of this runner are not overlapped"
        self._num_slots, self._capacity = plan.num_slots, plan.capacity
        self._copy(plan.copies)
        return Played(StepResult(tuple(self._row(row) for batch in plan.batches for row in batch)))

    def finish(self, launched: Played) -> StepResult:
        return launched.result

    def encode(self, piece: MediaPiece) -> None:
        raise AssertionError("there are no images here")

    def reset(self) -> None:
        self._num_slots = self._capacity = 0
        self._parts.clear()

    def clear_prefixes(self) -> None:
        self._blocks.clear()

    def _copy(self, copies: PrefixCopies) -> None:
        for i in copies.drops:
            self._blocks.pop(i, None)
        for save in copies.saves:
            self._blocks[save.block_id] = save.end - save.start

    def _row(self, row: RowPlan) -> RowResult:
        if not row.is_sampling:
            return RowResult(row.sequence_id, ())
        generated = list(row.history[row.num_prompt :])
        drafts = row.token_ids[row.num_fed - row.num_drafts :]
        targets: list[int] = []
        for i in range(row.num_drafts + 1):
            targets.append(self._target(row, generated + targets, i))
            if i < row.num_drafts and targets[-1] != drafts[i]:
                break
        return RowResult(row.sequence_id, tuple(targets), logprobs=_logprobs(row, targets))

    def _target(self, row: RowPlan, generated: Sequence[int], position: int) -> int:
        mask = None if row.masks is None else row.masks[position]

        def allowed(token_id: int) -> bool:
            return mask is None or bool(mask[token_id // 32] >> (token_id % 32) & 1)

        found = self._part(row).next_id(generated, allowed)
        if found is not None:
            return found
        said = self._pieces.decode(generated)
        self._num_lost[row.sequence_id] += 1
        if self._num_lost[row.sequence_id] > MAX_LOST:
            raise RuntimeError("the answer has left the script")
        if mask is None:  # the script was left before: no grammar holds the answer now
            return self._pieces.end_id
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        ids = np.flatnonzero(bits[: len(self._pieces.of_id)])
        some = [self._pieces.of_id[i].decode(errors="replace") for i in ids[:20]]
        self._report(f"the grammar forbids what follows {said[-200:]!r}; it allows {some}")
        return self._pieces.end_id if allowed(self._pieces.end_id) else int(ids[0])

    def _part(self, row: RowPlan) -> Part:
        part = self._parts.get(row.sequence_id)
        if part is None:
            prompt = self._pieces.decode(row.history[: row.num_prompt])
            part = self._parts[row.sequence_id] = Part(self._play(prompt), self._pieces)
        return part


def _logprobs(row: RowPlan, targets: Sequence[int]) -> tuple[TokenLogprobs, ...]:
    if row.params.logprobs is None:
        return ()
    return tuple(TokenLogprobs(token_id, 0.0, ((token_id, 0.0),)) for token_id in targets)
