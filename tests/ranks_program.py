"""One rank of a model, for tests/test_tensor_parallel.py: `python ranks_program.py FOLDER OUT`.

Rank 0 answers requests in two waves (the second one meets cached prefixes) and writes their tokens to OUT,
and the drafts of an MTP head.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from image_files import noise
from outrider import LLM, SamplingParams

WAVES = (
    [[5, 9, 2, 40, 41, 7], [3], list(range(20, 45)), [88, 1, 4] * 30],
    [[88, 1, 4] * 30 + [7, 7], [6, 60], list(range(20, 40))],
)
FOLLOWED = ("kv_bits", "prefix_cache_dir", "rank_head")  # settings of ranks other than 0
SETTINGS: dict[str, Any] = {"max_rows": 3, "prefill_step_size": 16}


def params(wave: int, number: int, drafts: bool, adapter: str | None) -> SamplingParams:
    depth = (4, 1, 3, 2)[number] if drafts else 0
    return SamplingParams(
        max_tokens=14, temperature=0.8 * (number % 2), seed=10 * wave + number, ignore_eos=True,
        draft_depth=depth, adapter=adapter,
        logit_bias={7: 1.5} if number == 2 else {}, presence_penalty=0.5 if number == 1 else 0.0,
    )  # fmt: skip


def answers(llm: LLM, drafts: bool) -> list[list[int]]:
    found, adapters = [], [*llm.engine.adapters, None]
    for number, wave in enumerate(WAVES):
        own = [adapters[i % len(adapters)] for i in range(len(wave))]
        outs = llm.generate(wave, [params(number, i, drafts, own[i]) for i in range(len(wave))])
        found += [list(out.token_ids) for out in outs]
    return found


def image_answers(llm: LLM) -> list[list[int]]:
    """Two images and a text, together and one after the other."""
    depth: Any = 3 if llm.engine.facts.drafter == "mtp" else "auto"
    greedy = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True, draft_depth=depth)
    text = {"type": "text", "text": "what?"}
    contents = [[{"type": "image", "image": noise(seed=seed)}, text] for seed in (3, 4)] + [[text]]
    conversations = [[{"role": "user", "content": content}] for content in contents]
    found = [*llm.chat(conversations, greedy)]
    found += [llm.chat(conversation, greedy) for conversation in conversations]
    return [list(answer.token_ids) for answer in found]


def recorded_drafts(runner: Any) -> dict[str, list[int]]:
    """The drafts that a head makes from now on: of which request, after how many cells -> tokens."""
    found: dict[str, list[int]] = {}
    finish = runner.finish

    def recording(launched: Any) -> Any:
        result = finish(launched)
        rows = [row for output in launched.outputs for row in output.batch]
        for row, one in zip(rows, result.rows, strict=True):
            num_cells = row.start + row.num_fed - row.num_drafts + one.num_accepted
            if one.drafts:
                found[f"{row.sequence_id} {num_cells}"] = list(one.drafts)
        return result

    runner.finish = recording
    return found


def main(folder: str, out: str) -> None:
    import mlx.core as mx

    from outrider import build, llm
    from outrider.config import EngineConfig
    from outrider.step.ranks import Ranks

    ranks = Ranks(mx.distributed.init(strict=True))
    settings = json.loads(Path(folder, "settings.json").read_text())
    if ranks.rank > 0:
        config = EngineConfig(**{key: value for key, value in settings.items() if key in FOLLOWED})
        adapters = settings.get("adapters", {})
        choice = build.ModelChoice(folder, adapters=adapters)
        build.follow_rank_0(choice, replace(config, max_adapters=len(adapters)), ranks)
        return
    rank_head = settings.pop("rank_head", "auto")

    def build_engine(choice: Any, config: EngineConfig) -> Any:
        place = build.EnginePlace(ranks=ranks)
        return build.build_engine(choice, replace(config, rank_head=rank_head), place=place)

    llm.build_engine = build_engine
    with LLM(folder, **SETTINGS, **settings) as served:
        drafts = served.engine.facts.drafter != "none"
        made = recorded_drafts(served.engine._loop.parts.runner)
        found = image_answers(served) if served.engine.facts.reads_images else answers(served, drafts)
        hits = served.engine.prefix_status().counts()
        rank_head = served.engine.facts.rank_head
    result = {
        "answers": found, "hits": hits, "bytes_sent": ranks.num_bytes_sent, "drafts": made,
        "rank_head": rank_head,
    }  # fmt: skip
    Path(out).write_text(json.dumps(result, default=str))


if __name__ == "__main__":
    main(*sys.argv[1:])
