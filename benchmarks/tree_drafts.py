"""How many tokens a step would gain from a tree of drafts, against a chain of as many drafts.

    python -m benchmarks.tree_drafts [--model M] [--tokens 160] [--rows 4]

With coupled sampling the model's next tokens are fixed before they are drafted. A tree is accepted along the
one path that equals them. So it is enough to know, after every token of real answers, the rank that each of
the next tokens has among the head's scores (logits and noise), if the head is fed the true tokens before it:

    ranks 1, 1, 2    a chain has two right drafts here; a tree with the second best third draft has three

The best tree of n drafts has the n rank prefixes that are most frequent. It is chosen from the same answers
that it is judged by, which favours trees.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence

import mlx.core as mx

from benchmarks.draft_traces import WORKLOADS
from benchmarks.side_by_side import BUDGET_BYTES, NullDetokenizer, StepBench
from outrider.cache.placement import Placement
from outrider.config import EngineConfig
from outrider.engine.scheduler import Scheduler
from outrider.engine.sequence import Sequence as Row
from outrider.llm import default_model
from outrider.models.heads import head_layout
from outrider.models.trunk import TrunkCache
from outrider.request import Request, SamplingParams
from outrider.sampling.noise import gumbel, seed_words

DEPTH = 6  # ranks that are recorded after each token
SIZES = (1, 2, 3, 4, 5, 6)  # drafts of a tree, and of the chain beside it
Ranks = tuple[int, ...]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=None)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--rows", type=int, default=4)
    args = parser.parse_args()
    bench = StepBench(args.model or default_model(), None, None)
    print("tokens per step: chain, best tree, gain, for", ", ".join(map(str, SIZES)), "drafts")
    for kind, (prompts, temperatures) in WORKLOADS.items():
        for temperature in temperatures:
            found = [
                ranks
                for row in _answers(bench, prompts[: args.rows], temperature, args.tokens)
                for ranks in _ranks_after_each_token(bench, row)
            ]
            _report(kind, temperature, found)


def _answers(bench: StepBench, prompts: Sequence[str], temperature: float, num_tokens: int) -> list[Row]:
    """Plain answers."""
    template = bench.loaded.tokenizer.apply_chat_template
    scheduler = Scheduler(EngineConfig(max_rows=len(prompts)), bench.runner.geometry(256), BUDGET_BYTES)
    rows = []
    for i, text in enumerate(prompts):
        prompt = template([{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False)
        params = SamplingParams(max_tokens=num_tokens, temperature=temperature, seed=i)
        request = Request(str(i), tuple(prompt), params)
        rows.append(Row(i, request, NullDetokenizer(), frozenset(bench.loaded.eos_ids), num_tokens))
        scheduler.add(rows[-1])
    while not scheduler.is_idle:
        step = scheduler.plan()
        assert step is not None
        step.result = bench.runner.run(step.plan)
        scheduler.commit(step)
    bench.runner.reset()
    return rows


def _ranks_after_each_token(bench: StepBench, row: Row) -> list[Ranks]:
    assert bench.head is not None
    trunk, layer = bench.loaded.trunk, bench.head.layers[0]
    num_cells = len(row.tokens) - 1
    tokens = mx.array([row.tokens])
    caches = [TrunkCache(trunk.layout), TrunkCache([head_layout(layer, trunk)])]
    for buffers in (buffers for cache in caches for buffers in cache.buffers()):
        buffers.resize(1, num_cells + DEPTH)
    place = _place(0, num_cells, num_cells + DEPTH)
    hidden = trunk.hidden(tokens[:, :-1], caches[0], place)
    out, fed_back = layer(hidden, trunk.embed(tokens[:, 1:]), caches[1].views(place)[0])
    found = []
    # From the last cell back: the cells before `cell` still hold the true pairs.
    for cell in range(num_cells - DEPTH - 1, row.num_prompt - 2, -1):
        scores, state = [_scores(bench, out[:, cell : cell + 1], cell + 2, row)], fed_back[:, cell : cell + 1]
        for further in range(1, DEPTH):
            here = _place(cell + further, 1, num_cells + DEPTH)
            true = trunk.embed(tokens[:, cell + further + 1][:, None])
            next_out, state = layer(state, true, caches[1].views(here)[0])
            scores.append(_scores(bench, next_out, cell + 2 + further, row))
        of_cell = mx.concatenate(scores)
        true_scores = mx.take_along_axis(of_cell, tokens[0, cell + 2 : cell + 2 + DEPTH][:, None], axis=1)
        ranks = 1 + (of_cell > true_scores).sum(axis=1)
        mx.eval(ranks, *caches[1].views(place)[0].arrays())
        found.append(tuple(ranks.tolist()))
    return found


def _place(start: int, num: int, capacity: int) -> Placement:
    return Placement([0], mx.array([start]), mx.array([num]), num, start + num, capacity)


def _scores(bench: StepBench, out: mx.array, position: int, row: Row) -> mx.array:
    """The head's scores of all tokens for one position, as it samples drafts.  [1, vocabulary]"""
    logits = bench.loaded.trunk.logits(out)[0]
    if row.params.is_greedy:
        return logits
    seeds = seed_words([row.params.seed or 0])
    noise = gumbel(seeds, mx.array([[position]]), mx.arange(logits.shape[-1]))
    return logits / row.params.temperature + noise[0]


def _report(kind: str, temperature: float, found: Sequence[Ranks]) -> None:
    prefixes = Counter(ranks[:num] for ranks in found for num in range(1, DEPTH + 1))
    by_rank = Counter(ranks[0] for ranks in found)
    shares = ", ".join(f"{by_rank[rank] / len(found):.0%}" for rank in (1, 2, 3, 4))
    print(f"{kind} at {temperature}: {len(found)} tokens; the first has rank 1, 2, 3, 4: {shares}")
    for size in SIZES:
        chain = 1 + sum(prefixes[(1,) * num] for num in range(1, size + 1)) / len(found)
        tree = 1 + sum(count for _, count in prefixes.most_common(size)) / len(found)
        print(f"  {size}: {chain:.2f} {tree:.2f} {tree / chain - 1:+.1%}", flush=True)


if __name__ == "__main__":
    main()
