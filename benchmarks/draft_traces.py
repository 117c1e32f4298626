"""Records, for every token of real answers, what the head and n-gram lookup would have drafted after it.

    python -m benchmarks.draft_traces --out FILE [--model M] [--tokens 250] [--rows 7]

The controllers of drafts are tested on these traces (tests/speculate). A trace is one answer:

    head       how many of the head's 8 drafts after each token are right, as a digit
    margins    the class of each of these drafts' margins (speculate/confidence.py), 8 digits for each token
    ngram      how many of a lookup's 8 drafts are right; "-": the lookup proposes nothing
    matches    how many tokens the lookup matched, as a hexadecimal digit; "-": likewise
"""

from __future__ import annotations

import argparse
import json
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

from benchmarks.side_by_side import BUDGET_BYTES, NullDetokenizer, StepBench
from outrider.bench.prompts import chat, code, records
from outrider.bench.workloads import JSON_REQUEST
from outrider.config import EngineConfig
from outrider.engine.draft_state import DraftState
from outrider.engine.scheduler import Scheduler
from outrider.engine.sequence import Sequence as Row
from outrider.llm import default_model
from outrider.request import MAX_DEPTH, Request, SamplingParams
from outrider.speculate.acceptance import num_matching
from outrider.speculate.confidence import MARGINS
from outrider.speculate.controller import DepthController, DraftRequest
from outrider.speculate.depth import DepthChoice
from outrider.speculate.ngram import NgramDrafter

WORDS = [f"Write a long list of unusual {what}." for what in ("words", "names", "animals", "places", "foods")]
WORKLOADS = {  # prompts, temperatures
    "chat": (chat.PROMPTS, (0.0, 0.8)),
    "code": (code.PROMPTS, (0.0, 0.8)),
    "json": ([JSON_REQUEST + text for text, _ in records.PROMPTS], (0.0, 0.8)),
    "words": (WORDS, (0.0, 1.2)),
}


class DraftsAndFeedsNone(DepthController):
    """The head makes all drafts at every token, and none of them is fed."""

    def choose(self, requests: Sequence[DraftRequest], num_cells: int, num_slots: int = 0) -> DepthChoice:
        nums = tuple(min(MAX_DEPTH, request.max_drafts_next) for request in requests)
        return DepthChoice(((0, 0),) * len(requests), nums)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default=None)
    parser.add_argument("--tokens", type=int, default=250)
    parser.add_argument("--rows", type=int, default=7)
    args = parser.parse_args()
    bench = StepBench(args.model or default_model(), None, None)
    bench.controller = DraftsAndFeedsNone()
    traces = []
    for kind, (prompts, temperatures) in WORKLOADS.items():
        for temperature in temperatures:
            found = _record(bench, prompts[: args.rows], temperature, args.tokens)
            traces += [{"kind": kind, "temperature": temperature, **trace} for trace in found]
            shares = [sum(int(c) >= j for t in found for c in t["head"]) for j in (1, 2, 3)]
            total = sum(len(trace["head"]) for trace in found)
            print(
                kind,
                temperature,
                f"{total} tokens, right:",
                [round(s / total, 2) for s in shares],
                flush=True,
            )
    args.out.write_text(json.dumps(traces, indent=0) + "\n")


def _record(
    bench: StepBench, prompts: Sequence[str], temperature: float, num_tokens: int
) -> list[dict[str, str]]:
    scheduler = Scheduler(
        EngineConfig(max_rows=len(prompts)), bench.runner.geometry(256), BUDGET_BYTES, bench.controller
    )
    template = bench.loaded.tokenizer.apply_chat_template
    rows = [
        Row(
            i,
            Request(
                str(i),
                tuple(
                    template(
                        [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
                    )
                ),
                SamplingParams(max_tokens=num_tokens, temperature=temperature, seed=i),
            ),
            NullDetokenizer(),
            frozenset(bench.loaded.eos_ids),
            num_tokens,
            DraftState(max_depth=MAX_DEPTH, head_depth=MAX_DEPTH, is_auto=True),
        )
        for i, text in enumerate(prompts)
    ]
    made: dict[int, dict[int, tuple[Sequence[int], Sequence[float]]]] = {row.id: {} for row in rows}
    for row in rows:
        scheduler.add(row)
    while not scheduler.is_idle:
        step = scheduler.plan()
        assert step is not None
        step.result = bench.runner.run(step.plan)
        scheduler.commit(step)
        for result in step.result.rows:
            if len(result.drafts) == MAX_DEPTH:
                made[result.sequence_id][len(rows[result.sequence_id].tokens)] = result.drafts, result.margins
    bench.runner.reset()
    return [_trace(row, made[row.id]) for row in rows]


def _trace(row: Row, made: dict[int, tuple[Sequence[int], Sequence[float]]]) -> dict[str, str]:
    head, margins, ngram, matches, lookup = "", "", "", "", NgramDrafter()
    for place, (drafts, of_drafts) in sorted(made.items()):
        following = row.tokens[place : place + MAX_DEPTH]
        if len(following) < MAX_DEPTH:
            break
        head += str(num_matching(drafts, following))
        margins += "".join(str(bisect_right(MARGINS.limits, margin)) for margin in of_drafts)
        found = lookup.propose(row.tokens[:place], MAX_DEPTH)
        ngram += str(num_matching(found.token_ids, following)) if found else "-"
        matches += f"{found.confidence[0]:x}" if found else "-"
    return {"head": head, "margins": margins, "ngram": ngram, "matches": matches}


if __name__ == "__main__":
    main()
