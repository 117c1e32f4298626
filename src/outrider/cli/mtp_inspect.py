"""`outrider mtp inspect`: finds the MTP head of a model and measures its speed-up on this machine."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.llm import LLM
    from outrider.models.heads import HeadFiles
    from outrider.train.evaluate import Acceptance

Verbs = argparse._SubParsersAction  # of argparse.ArgumentParser

DEPTH = 3  # draft tokens per step when acceptance is measured; chosen by hand
TEMPERATURES = (0.0, 0.8)  # at which acceptance is measured; chosen by hand
PROMPTS = (
    "Why is the sky blue during the day and red in the evening?",
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "Give me a recipe for lentil soup for four people.",
    "Summarise the story of Robin Hood in one paragraph.",
    "Translate into French: The train leaves at seven and arrives before noon.",
    "List five countries with their capitals as a JSON object.",
    "Explain the difference between a process and a thread.",
    "Write a short, polite e-mail asking a landlord to repair the heating.",
)


@dataclass(frozen=True)
class Speed:
    rows: int
    ratio: float  # tokens per second with drafts over without, median of the rounds
    rounds: tuple[float, ...]


def add_inspect(verbs: Verbs[argparse.ArgumentParser]) -> None:
    inspect = verbs.add_parser(
        "inspect",
        help="find the head of a model and measure its speed-up",
        description="Shows whether a model has an MTP head, where the head is and its layout. Then answers "
        "built-in prompts, to measure how many draft tokens are accepted and how much faster the answers "
        "come. The exit status is 1 if there is no head.",
    )
    inspect.add_argument(
        "model", nargs="?", help="model folder, GGUF file or Hugging Face id (default: SmolLM2-135M-Instruct)"
    )
    inspect.add_argument(
        "--head", type=Path, metavar="FILE", help="file of a head that is not beside the model"
    )
    inspect.add_argument(
        "--files-only", action="store_true", help="only look at the files; do not load the model"
    )
    inspect.add_argument("--tokens", type=int, default=96, metavar="N", help="longest answer (default: 96)")
    inspect.add_argument(
        "--rows",
        type=int,
        nargs="+",
        default=[1, 4],
        metavar="N",
        help="concurrent requests to time (default: 1 4)",
    )
    inspect.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds of timing (default: 3)")
    inspect.add_argument("--json", action="store_true", help="print the results as JSON")
    inspect.set_defaults(run=run_inspect)


def run_inspect(args: argparse.Namespace) -> int:
    from outrider.llm import default_model
    from outrider.models import heads, loader
    from outrider.models.drafter_kinds import drafter_kind
    from outrider.models.files.shipped_head import shipped_head
    from outrider.models.heads.head_files import read_config

    folder = loader.find_folder(args.model or default_model())
    config = read_config(folder)
    if (kind := drafter_kind(config)) is not None:
        text = f"{folder} is {kind}. Outrider does not serve such drafters yet."
        _print(args, {"model": str(folder), "head": None, "drafter": kind}, text)
        return 1
    file = args.head or heads.find_head(folder)
    head = heads.locate_file(file, config) if file is not None else heads.locate(folder)
    if head is None and (shipped := shipped_head(folder)) is not None:
        head = heads.locate_file(shipped, config)
    if head is None:
        _print(
            args, {"model": str(folder), "head": None}, f"{folder} has no MTP head. {_remedy(folder, config)}"
        )
        return 1
    found: dict[str, Any] = {"model": str(folder), "head": _facts(head)}
    text = _describe(head)
    if not args.files_only:
        figures = _measure(folder, head, args)
        found |= figures
        text += "\n" + _render(figures)
    _print(args, found, text)
    return 0


def _print(args: argparse.Namespace, found: dict[str, Any], text: str) -> None:
    print(json.dumps(found, indent=2) if args.json else text)


def _remedy(folder: Path, config: dict[str, Any]) -> str:
    from outrider.models.heads import expected

    train = f"train one: outrider mtp train {folder}"
    if expected(config):
        return (
            "Its config says that the original checkpoint has one: extract it (outrider mtp extract ORIGINAL "
            f"--into {folder}), or {train}"
        )
    return train[0].upper() + train[1:]


def _facts(head: HeadFiles) -> dict[str, Any]:
    return {
        "source": str(head.source),
        "inside_checkpoint": head.is_inside,
        "layout": head.tensors.layout.name,
        "layers": head.tensors.num_depths,
        "dtypes": sorted(head.dtypes),
        "quantization": head.quantization,
        "tensors": len(head.stored),
        "bytes": head.num_bytes,
    }


def _describe(head: HeadFiles) -> str:
    facts = _facts(head)
    place = "inside the checkpoint" if head.is_inside else "in a separate file"
    layers = "one layer" if facts["layers"] == 1 else f"{facts['layers']} layers, one for each depth"
    formats = head.quantization
    quantization = f", {formats['bits']} bits in groups of {formats['group_size']}" if formats else ""
    return "\n".join(
        (
            f"Head:    {head.source} ({place})",
            f"Layout:  {facts['layout']}, {layers}, {facts['tensors']} tensors, "
            f"{', '.join(facts['dtypes'])}{quantization}, {head.num_bytes / 1e6:.1f} MB",
        )
    )


# -- measuring -------------------------------------------------------------------------------------------


def _measure(folder: Path, head: HeadFiles, args: argparse.Namespace) -> dict[str, Any]:
    from outrider.llm import LLM
    from outrider.progress import Progress, ProgressBar

    bar, num_parts = ProgressBar(), len(TEMPERATURES) + len(args.rows)

    def show(num_done: int, note: str) -> None:
        bar(Progress("Measuring the head", num_done, num_parts, "parts", note))

    show(0, "loading the model")
    file = None if head.is_inside else head.source
    with closing(bar), LLM(folder, head=file, drafter="mtp", generation_config="none") as llm:
        prompts = [_ids(llm, prompt) for prompt in PROMPTS]
        acceptance = {}
        for number, temperature in enumerate(TEMPERATURES):
            show(number, f"answering {len(prompts)} prompts at temperature {temperature:g}")
            acceptance[temperature] = _acceptance(llm, prompts, args.tokens, temperature)
        speeds = []
        for number, rows in enumerate(args.rows, len(TEMPERATURES)):
            show(number, f"timing {rows} row{'s' if rows > 1 else ''} with and without drafts")
            speeds.append(_speed(llm, prompts, rows, args.tokens, args.rounds))
        show(num_parts, "")
    return {
        "acceptance": [
            {
                "temperature": temperature,
                "by_position": [round(share, 4) for share in one.acceptance_rates],
                "tokens_a_step": round(one.tokens_per_step, 3),
            }
            for temperature, one in acceptance.items()
        ],
        "speed": [{"rows": one.rows, "ratio": round(one.ratio, 3), "rounds": one.rounds} for one in speeds],
    }


def _ids(llm: LLM, prompt: str) -> tuple[int, ...]:
    from outrider.train.scripts import script_for

    return script_for(llm.tokenizer).to_answer([{"role": "user", "content": prompt}])


def _acceptance(
    llm: LLM, prompts: Sequence[tuple[int, ...]], num_tokens: int, temperature: float
) -> Acceptance:
    from outrider.request import SamplingParams
    from outrider.train.evaluate import Acceptance

    params = [
        SamplingParams(max_tokens=num_tokens, temperature=temperature, seed=seed, draft_depth=DEPTH)
        for seed in range(len(prompts))
    ]
    total = Acceptance(0, (0,) * DEPTH, (0,) * DEPTH)
    for answer in llm.generate(list(prompts), params):
        stats = answer.stats
        missing = [0] * (DEPTH - len(stats.drafted))
        steps = stats.steps - 1  # the first token comes with the prompt, without drafts
        total = total.plus(Acceptance(steps, (*stats.drafted, *missing), (*stats.accepted, *missing)))
    return total


def _speed(llm: LLM, prompts: Sequence[tuple[int, ...]], rows: int, num_tokens: int, rounds: int) -> Speed:
    """With the depth that the engine chooses and without drafts, in turns."""
    chosen = [prompts[i % len(prompts)] for i in range(rows)]
    _tokens_per_second(llm, chosen, "auto", num_tokens)  # warm-up: compiles, and measures the costs of steps
    found = []
    for _ in range(rounds):
        without, drafting = (_tokens_per_second(llm, chosen, depth, num_tokens) for depth in (0, "auto"))
        found.append(drafting / without)
    return Speed(rows, median(found), tuple(round(ratio, 3) for ratio in found))


def _tokens_per_second(llm: LLM, prompts: Sequence[tuple[int, ...]], depth: Any, num_tokens: int) -> float:
    from outrider.request import SamplingParams

    started_s = time.perf_counter()
    answers = llm.generate(
        list(prompts), SamplingParams(max_tokens=num_tokens, temperature=0, draft_depth=depth)
    )
    return sum(len(answer.token_ids) for answer in answers) / (time.perf_counter() - started_s)


def _render(figures: dict[str, Any]) -> str:
    lines = [
        f"Drafts accepted at depth {DEPTH} by position, as a share of those whose previous draft was "
        f"accepted ({len(PROMPTS)} built-in prompts):"
    ]
    for one in figures["acceptance"]:
        name = "greedy" if one["temperature"] == 0 else f"temperature {one['temperature']:g}"
        shares = " ".join(f"{share:4.0%}" for share in one["by_position"])
        lines.append(f"  {name:<16} {shares}, {one['tokens_a_step']:.2f} tokens per step")
    lines.append(
        "Speed on this machine with drafts over without, greedy, with prefill (lowest-highest of the rounds):"
    )
    for one in figures["speed"]:
        spread = f"{min(one['rounds']):.2f}-{max(one['rounds']):.2f}"
        lines.append(
            f"  {one['rows']:>3} row{'s' if one['rows'] > 1 else ' '}         {one['ratio']:.2f}x ({spread})"
        )
    return "\n".join(lines)
