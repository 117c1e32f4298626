"""Synthesises conversations in which the trunk writes both sides: the training data of a head.

A fixed number of rows decode side by side. When the conversation of a row ends, the row starts the next one
of the queue. All of this is array arithmetic on the device, so that a whole step is one CUDA graph.

    python recipes/default_head/synthesise.py MODEL_FOLDER conversations.safetensors
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from conversations import Conversations, containing, joined, without_loops
from kernels import sample_tokens
from prompts import TO_ASSISTANT, TO_USER, Beginning, beginnings
from tokenizers import Tokenizer
from torch import Tensor
from trunk import Decoder, Trunk, load_trunk

HELD_OUT = (
    Path(__file__).parents[2] / "src/outrider/models/files/data/smollm2-135m-instruct/held_out_prompts.json"
)

TURN_ENDS = (2, 0)  # <|im_end|>, <|endoftext|>
USER, ASSISTANT = 0, 1
# Chosen by hand.
USER_MIN_P = 0.04  # user turns are sampled at temperature 1, without unlikely tokens
MAX_USER_TURN = 160  # tokens
MIN_TARGETS = 8  # conversations with fewer targets are dropped
ROOM_FOR_ANOTHER_TURN = 96  # tokens that must be free before another user turn starts

KIND_SHARES = {"free": 0.35, "system": 0.08, "opening": 0.32, "question": 0.25, "everyday": 0.0}  # see Mix
TEMPERATURES = (0.6, 1.0)  # sampled answers: uniform between these


@dataclass(frozen=True)
class Run:
    """A number of rows that decode together."""

    rows: int
    capacity: int  # tokens a row can hold
    steps: int
    limits: tuple[int, ...]  # conversations are cut at one of these lengths, at random
    max_turns: int  # a conversation has 1 to max_turns answers, at random


@dataclass(frozen=True)
class Mix:
    """The shares of the kinds of conversations."""

    greedy: float  # share of conversations whose answers are greedy
    everyday: float  # share that begins with an everyday question; the other kinds share the rest

    def share_of(self, kind: str) -> float:
        return self.everyday if kind == "everyday" else (1 - self.everyday) * KIND_SHARES[kind]


RUNS = (
    Run(rows=2560, capacity=768, steps=8_500, limits=(384, 576, 768), max_turns=2),
    Run(rows=1024, capacity=2048, steps=4_000, limits=(1536, 2048), max_turns=12),
)


@dataclass(frozen=True)
class Scripts:
    """Token sequences that are forced on rows: the beginnings, then the two changes of turn."""

    token_ids: Tensor  # [scripts, longest]
    lengths: Tensor  # [scripts]
    next_speaker: Tensor  # [scripts]

    @classmethod
    def of(cls, starts: list[Beginning], tokenizer: Tokenizer, device: torch.device) -> Scripts:
        turns = [tokenizer.encode(text).ids for text in (TO_USER, TO_ASSISTANT)]
        rows = [torch.tensor(ids) for ids in [start.token_ids for start in starts] + turns]
        speakers = [ASSISTANT if start.asks else USER for start in starts] + [USER, ASSISTANT]
        return cls(
            torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device),
            torch.tensor([len(row) for row in rows], device=device),
            torch.tensor(speakers, device=device),
        )

    def turn_to(self, speaker: Tensor) -> Tensor:
        """The script after which USER or ASSISTANT speaks."""
        return len(self.lengths) - 2 + speaker


@dataclass(frozen=True)
class Queue:
    """The conversations in order, with everything that is decided before they start."""

    script: Tensor  # [C]
    temperature: Tensor  # [C] of the assistant; 0 is greedy
    limit: Tensor  # [C] tokens
    turns: Tensor  # [C] answers

    @classmethod
    def sample(
        cls, starts: list[Beginning], mix: Mix, run: Run, size: int, seed: int, device: torch.device
    ) -> Queue:
        generator = torch.Generator().manual_seed(seed)
        kinds = list(KIND_SHARES)
        members = [[i for i, start in enumerate(starts) if start.kind == kind] for kind in kinds]
        weight = torch.zeros(len(starts))
        for kind, indices in zip(kinds, members, strict=True):
            weight[indices] = mix.share_of(kind) / len(indices)
        low, high = TEMPERATURES
        heat = low + (high - low) * torch.rand(size, generator=generator)
        greedy = torch.rand(size, generator=generator) < mix.greedy
        limits = torch.tensor(run.limits)
        fields = (
            torch.multinomial(weight, size, replacement=True, generator=generator),
            torch.where(greedy, 0.0, heat),
            limits[torch.randint(len(limits), (size,), generator=generator)],
            torch.randint(1, run.max_turns + 1, (size,), generator=generator),
        )
        return cls(*(field.to(device) for field in fields))


class Synthesiser:
    """The rows of one run, and the record of their tokens."""

    def __init__(self, trunk: Trunk, scripts: Scripts, queue: Queue, run: Run, first_stream: int) -> None:
        device = trunk.device
        self._trunk, self._scripts, self._queue, self._run = trunk, scripts, queue, run
        self._decoder = Decoder(trunk, run.rows, run.capacity)
        self._first_stream = first_stream
        self._min_p = torch.tensor([USER_MIN_P, 0.0], device=device)

        def column(dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(run.rows, dtype=dtype, device=device)

        self._conversation = torch.arange(run.rows, device=device)
        self._num_started = torch.tensor([run.rows], device=device)
        self._position, self._token = column(), column()
        self._speaker, self._wrote = column(), column()  # writers of the next and the current token
        self._script, self._cursor = column(), column()  # the row's script, and the next place in it
        self._turns_left, self._turn_start = column(), column()
        self._was_sampled, self._is_last = column(torch.bool), column(torch.bool)
        self._step = torch.zeros(1, dtype=torch.int64, device=device)
        record = (run.steps, run.rows)
        self._tokens = torch.zeros(record, dtype=torch.int32, device=device)
        self._targets = torch.zeros(record, dtype=torch.bool, device=device)
        self._starts = torch.zeros(record, dtype=torch.int32, device=device)  # conversation + 1 at its start
        self._restart(torch.ones_like(self._is_last))

    def run(self) -> Conversations:
        advance = self._captured() if self._token.is_cuda else self._advance
        while int(self._step) < self._run.steps:
            for _ in range(min(250, self._run.steps - int(self._step))):
                advance()
        return self._conversations()

    def _captured(self) -> Callable[[], None]:
        """A step as a CUDA graph. The warm-up before the capture takes three steps of the run."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._advance()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._advance()
        replay: Callable[[], None] = graph.replay
        return replay

    def _advance(self) -> None:
        """Feed the token of every row and sample the next one."""
        self._record()
        queue = self._queue
        hidden = self._decoder.step(self._token, self._position)
        answering = self._speaker == ASSISTANT
        temperature = torch.where(answering, queue.temperature[self._conversation], 1.0)
        stream = self._first_stream + self._conversation * self._run.capacity + self._position
        sampled = sample_tokens(self._trunk.logits(hidden), temperature, self._min_p[self._speaker], stream)
        ends = self._is_last | (self._position + 1 >= queue.limit[self._conversation])
        self._move(sampled)
        self._begin_next(ends)

    def _record(self) -> None:
        is_target = self._was_sampled & (self._wrote == ASSISTANT)
        self._tokens.index_copy_(0, self._step, self._token.int()[None])
        self._targets.index_copy_(0, self._step, is_target[None])
        started = torch.where(self._position == 0, self._conversation + 1, 0)
        self._starts.index_copy_(0, self._step, started.int()[None])
        self._step += 1

    def _move(self, sampled: Tensor) -> None:
        """Move every row to its next token: the script's token, or the sampled one after the script's end."""
        scripts = self._scripts
        scripted = self._cursor < scripts.lengths[self._script]
        place = self._cursor.clamp(max=scripts.token_ids.shape[1] - 1)
        token = torch.where(scripted, scripts.token_ids[self._script, place], sampled)
        position = self._position + 1
        is_too_long = (self._speaker == USER) & (position - self._turn_start >= MAX_USER_TURN)
        token = torch.where(~scripted & is_too_long, TURN_ENDS[0], token)
        turn_ends = ~scripted & ((token == TURN_ENDS[0]) | (token == TURN_ENDS[1]))
        answered = turn_ends & (self._speaker == ASSISTANT)
        other = 1 - self._speaker
        room = self._queue.limit[self._conversation] - position
        self._turns_left -= answered.long()
        self._is_last.copy_(answered & ((self._turns_left <= 0) | (room < ROOM_FOR_ANOTHER_TURN)))
        self._wrote.copy_(self._speaker)
        self._was_sampled.copy_(~scripted)
        self._script.copy_(torch.where(turn_ends, scripts.turn_to(other), self._script))
        self._cursor.copy_(torch.where(turn_ends, 0, self._cursor + scripted))
        self._speaker.copy_(torch.where(turn_ends, other, self._speaker))
        self._turn_start.copy_(torch.where(scripted | turn_ends, position, self._turn_start))
        self._token.copy_(token)
        self._position.copy_(position)

    def _begin_next(self, ends: Tensor) -> None:
        """Give the next conversations of the queue to rows whose conversation ends."""
        order = ends.long().cumsum(0)
        upcoming = (self._num_started + order - 1) % len(self._queue.script)
        self._conversation.copy_(torch.where(ends, upcoming, self._conversation))
        self._num_started += order[-1:]
        self._restart(ends)

    def _restart(self, chosen: Tensor) -> None:
        """Set the chosen rows to the beginning of their conversations."""
        queue, scripts = self._queue, self._scripts
        script = queue.script[self._conversation]

        def restart(state: Tensor, value: Tensor | int | bool) -> None:
            state.copy_(torch.where(chosen, value, state))

        restart(self._script, script)
        restart(self._token, scripts.token_ids[script, 0])
        restart(self._speaker, scripts.next_speaker[script])
        restart(self._turns_left, queue.turns[self._conversation])
        restart(self._cursor, 1)
        for state in (self._position, self._turn_start):
            restart(state, 0)
        for flag in (self._was_sampled, self._is_last):
            restart(flag, False)

    def _conversations(self) -> Conversations:
        begun = self._starts.T.flatten()
        starts = begun.nonzero()[:, 0]
        ends = starts.new_tensor([begun.numel()])
        conversation = begun[starts].long() - 1
        return Conversations(
            self._tokens.T.flatten(),
            self._targets.T.flatten(),
            torch.cat([starts, ends]),
            self._queue.temperature[conversation] == 0,
        )


def synthesise(
    trunk: Trunk, tokenizer: Tokenizer, mix: Mix, runs: tuple[Run, ...], seed: int
) -> Conversations:
    """The conversations of all runs, before cleaning."""
    starts = beginnings(lambda text: tokenizer.encode(text).ids)
    scripts = Scripts.of(starts, tokenizer, trunk.device)
    parts = []
    for index, run in enumerate(runs):
        began = time.monotonic()
        size = run.rows * (2 + run.steps // 64)  # more than the run can start
        queue = Queue.sample(starts, mix, run, size, seed + index, trunk.device)
        first_stream = (seed * len(runs) + index) << 40
        parts.append(Synthesiser(trunk, scripts, queue, run, first_stream).run())
        seconds = time.monotonic() - began
        rate = run.rows * run.steps / seconds
        print(f"run {index + 1}: {run.rows} rows, {run.steps} steps, {seconds:.0f} s, {rate:,.0f} tokens/s")
    return joined(parts)


def cleaned(raw: Conversations, held_out: list[list[int]]) -> Conversations:
    """Cut endless loops. Drop conversations with a held-out prompt or with fewer than MIN_TARGETS targets."""
    cut, loops = without_loops(raw)
    leaks = containing(cut, held_out)
    short = cut.num_targets() < MIN_TARGETS
    kept = cut.select(~leaks & ~short)
    for what, mask in (("cut at a loop", loops), ("with a held-out prompt", leaks), ("too short", short)):
        print(f"{int(mask.sum()):,} of {len(raw):,} conversations {what}")
    if len(kept) == 0:
        raise SystemExit("No conversation is long enough. Take more steps.")
    greedy = kept.num_targets()[kept.is_greedy].sum() / kept.is_target.sum()
    print(
        f"{len(kept):,} conversations left, {len(kept.token_ids):,} tokens, "
        f"{int(kept.is_target.sum()):,} of the assistant, {float(greedy):.0%} of them greedy; "
        f"longest {int(kept.lengths.max())}, mean {float(kept.lengths.float().mean()):.0f}"
    )
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("model", type=Path, help="a converted model folder")
    parser.add_argument("out", type=Path, help="the file to write")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rows", type=float, default=1.0, help="share of the usual rows, for a test")
    parser.add_argument(
        "--steps", type=float, nargs="+", default=[1.0], help="share of the usual steps, or one for each run"
    )
    parser.add_argument("--greedy", type=float, default=0.5, help="share of conversations answered greedily")
    parser.add_argument("--everyday", type=float, default=0.0, help="share of everyday questions")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    trunk = load_trunk(args.model, device, torch.float16 if device == "cuda" else torch.float32)
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    if len(args.steps) not in (1, len(RUNS)):
        parser.error(f"--steps takes one number, or {len(RUNS)}")
    shares = args.steps * len(RUNS) if len(args.steps) == 1 else args.steps
    runs = tuple(
        replace(run, rows=max(2, int(run.rows * args.rows)), steps=int(run.steps * share))
        for run, share in zip(RUNS, shares, strict=True)
    )
    held_out = [tokenizer.encode(text).ids for text in json.loads(HELD_OUT.read_text())]
    mix = Mix(args.greedy, args.everyday)
    cleaned(synthesise(trunk, tokenizer, mix, runs, args.seed), held_out).save(args.out)


if __name__ == "__main__":
    main()
