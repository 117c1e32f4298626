"""How often a head's drafts are accepted, on prompts that no training data contains.

    python recipes/default_head/evaluate.py MODEL_FOLDER head.safetensors

The trunk answers every prompt in float32, greedily and at several temperatures. Then the steps of speculative
decoding over each answer are simulated: a draft is accepted if it equals the answer's token. Sampled drafts
use the same Gumbel noise as the answer, as the engine does. Small models fall into loops, and loops are easy
to draft. Every figure is therefore given twice: for whole answers, and for answers cut at the start of a
loop.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from conversations import loop_starts
from head import Head, load_head
from kernels import sample_tokens
from prompts import question
from synthesise import HELD_OUT, TURN_ENDS
from tokenizers import Tokenizer
from torch import Tensor
from trunk import Decoder, Trunk, load_trunk

STREAMS_PER_ANSWER = 1 << 20


@dataclass(frozen=True)
class Answer:
    """A prompt and the trunk's own answer to it."""

    token_ids: Tensor  # [n] prompt and answer
    hidden: Tensor  # [n, H]
    prompt_length: int
    temperature: float
    first_stream: int  # the token at position p was sampled with the noise stream first_stream + p

    def cut_at_loop(self) -> Answer:
        places = torch.arange(len(self.token_ids), device=self.token_ids.device)
        loops = loop_starts(self.token_ids.int(), places).nonzero()[:, 0]
        end = int(loops[0]) if len(loops) else len(places)
        return Answer(
            self.token_ids[:end], self.hidden[:end], self.prompt_length, self.temperature, self.first_stream
        )


@dataclass
class Tally:
    """Counts over the steps of speculative decoding at one depth."""

    depth: int
    steps: int = 0

    def __post_init__(self) -> None:
        self.tried = [0] * self.depth
        self.accepted = [0] * self.depth

    def count_steps(self, is_accepted: Sequence[Sequence[bool]]) -> None:
        """is_accepted[d - 1][i]: depth d of the chain that starts at i drafts the answer's token."""
        at = 0
        while at < len(is_accepted[0]):
            self.steps += 1
            num_accepted = 0
            for place in range(self.depth):
                if at >= len(is_accepted[place]):
                    break
                self.tried[place] += 1
                if not is_accepted[place][at]:
                    break
                self.accepted[place] += 1
                num_accepted += 1
            at += num_accepted + 1

    def rates(self) -> list[float]:
        """By position: the share of drafts that are accepted when all drafts before them were accepted."""
        return [accepted / max(1, tried) for accepted, tried in zip(self.accepted, self.tried, strict=True)]

    def tokens_per_step(self) -> float:
        return 1 + sum(self.accepted) / max(1, self.steps)


@torch.no_grad()
def answers(
    trunk: Trunk, prompts: list[list[int]], temperature: float, max_tokens: int, seed: int
) -> list[Answer]:
    """The trunk's answers to all prompts. An answer ends with its end-of-turn token or after `max_tokens`."""
    device, rows = trunk.device, len(prompts)
    lengths = torch.tensor([len(ids) for ids in prompts], device=device)
    given = torch.nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids in prompts], batch_first=True).to(
        device
    )
    capacity = given.shape[1] + max_tokens
    decoder = Decoder(trunk, rows, capacity)
    streams = (seed * rows + torch.arange(rows, device=device)) * STREAMS_PER_ANSWER
    heat, no_floor = torch.full((rows,), temperature, device=device), torch.zeros(rows, device=device)
    tokens, hidden, token = [], [], given[:, 0]
    for position in range(capacity):
        tokens.append(token)
        hidden.append(decoder.step(token, torch.full_like(token, position)))
        token = sample_tokens(trunk.logits(hidden[-1]), heat, no_floor, streams + position + 1)
        if position + 1 < given.shape[1]:
            token = torch.where(position + 1 < lengths, given[:, position + 1], token)
    spoken, states = torch.stack(tokens, dim=1), torch.stack(hidden, dim=1)
    result = []
    for row, start in enumerate(lengths.tolist()):
        end = start + max_tokens
        ends = torch.isin(spoken[row, start:end], torch.tensor(TURN_ENDS, device=device)).nonzero()
        end = start + int(ends[0]) + 1 if len(ends) else end
        result.append(Answer(spoken[row, :end], states[row, :end], start, temperature, int(streams[row])))
    return result


@torch.no_grad()
def accepted_drafts(
    head: Head, trunk: Trunk, answer: Answer, depth: int, vocabulary: Tensor | None
) -> list[list[bool]]:
    """For every depth and start of a chain in the answer: True if the draft equals the answer's token."""
    tokens = answer.token_ids
    outs = head(trunk.embedding[tokens][None].float(), answer.hidden[None].float(), depth)
    excluded = None
    if vocabulary is not None:
        excluded = torch.ones(trunk.shape.vocab_size, dtype=torch.bool, device=tokens.device)
        excluded[vocabulary] = False
    result = []
    for place, out in enumerate(outs, start=1):
        drafted = torch.arange(answer.prompt_length + place, len(tokens), device=tokens.device)
        logits = out[0, drafted - place - 1] @ trunk.embedding.float().T
        if excluded is not None:
            logits = logits.masked_fill(excluded, float("-inf"))
        heat = torch.full((len(drafted),), answer.temperature, device=tokens.device)
        sampled = sample_tokens(logits, heat, torch.zeros_like(heat), answer.first_stream + drafted)
        result.append((sampled == tokens[drafted]).tolist())
    return result


def evaluated(
    head: Head, trunk: Trunk, given: list[Answer], depth: int, vocabulary: Tensor | None
) -> tuple[Tally, list[Tally]]:
    """The tally over all answers, and the tally of each answer."""
    total, each = Tally(depth), []
    for answer in given:
        if len(answer.token_ids) < answer.prompt_length + 2:
            continue  # an answer of one token has no drafts
        is_accepted = accepted_drafts(head, trunk, answer, depth, vocabulary)
        total.count_steps(is_accepted)
        each.append(Tally(depth))
        each[-1].count_steps(is_accepted)
    return total, each


def confidence_interval(each: list[Tally], num_resamples: int = 2000) -> tuple[float, float]:
    """95 % interval of the first draft's acceptance rate, by bootstrap over the prompts."""
    counts = torch.tensor([[tally.accepted[0], tally.tried[0]] for tally in each], dtype=torch.float64)
    chosen = torch.randint(len(each), (num_resamples, len(each)), generator=torch.Generator().manual_seed(0))
    sums = counts[chosen].sum(1)
    low, high = (sums[:, 0] / sums[:, 1]).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("model", type=Path, help="a converted model folder")
    parser.add_argument("head", type=Path)
    parser.add_argument("--prompts", type=Path, default=HELD_OUT)
    parser.add_argument("--tokens", type=int, default=400, help="most tokens in an answer")
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--temperatures", type=float, nargs="*", default=[0.0, 0.7, 0.8, 1.0])
    parser.add_argument("--answers", type=int, default=4, help="sampled answers to every prompt")
    parser.add_argument(
        "--vocabularies", type=int, nargs="*", default=[8192, 4096], help="further sizes to evaluate"
    )
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    trunk = load_trunk(args.model, device, torch.float32)
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    head, draft_ids = load_head(args.head, trunk.shape, device)
    prompts = [tokenizer.encode(question(text)).ids for text in json.loads(args.prompts.read_text())]
    vocabularies: dict[str, Tensor | None] = {"whole vocabulary": None}
    if draft_ids is not None:
        sizes = [len(draft_ids), *(size for size in args.vocabularies if size < len(draft_ids))]
        vocabularies |= {f"{size:,} ids": draft_ids[:size] for size in sizes}
    print(
        "| answers | drafts from | accepted, by place | tokens a step | loops cut: accepted | tokens a step |"
    )
    print("|---|---|---|---|---|---|")
    for temperature in args.temperatures:
        num = args.answers if temperature else 1
        given = [a for seed in range(num) for a in answers(trunk, prompts, temperature, args.tokens, seed)]
        cut = [answer.cut_at_loop() for answer in given]
        name = f"temperature {temperature}" if temperature else "greedy"
        for which, vocabulary in vocabularies.items():
            cells = []
            for chosen in (given, cut):
                tally, each = evaluated(head, trunk, chosen, args.depth, vocabulary)
                rates = " ".join(f"{rate:.3f}" for rate in tally.rates())
                low, high = confidence_interval(each)
                cells += [f"{rates} (first {low:.2f}–{high:.2f})", f"{tally.tokens_per_step():.2f}"]
            print(f"| {name} | {which} | {' | '.join(cells)} |", flush=True)
        for depth in range(1, args.depth):
            for which, vocabulary in list(vocabularies.items())[:2]:
                tally, _ = evaluated(head, trunk, given, depth, vocabulary)
                rates = " ".join(f"{rate:.3f}" for rate in tally.rates())
                stride = f"{tally.tokens_per_step():.2f}"
                print(f"| {name} | {which}, depth {depth} | {rates} | {stride} | | |", flush=True)


if __name__ == "__main__":
    main()
