"""Peak memory over the length of a prompt: it grows linearly, with the cells, and not with their square."""

from __future__ import annotations

import gc
import itertools
from pathlib import Path

import mlx.core as mx

from outrider import LLM, SamplingParams
from outrider.engine.memory_plan import MAX_CPU_ROWS
from tiny_models import write_checkpoint

LENGTHS = (1000, 2000, 4000, 8000)


def test_peak_memory_grows_linearly_with_the_prompt(tmp_path: Path) -> None:
    gc.collect()  # what other tests left
    write_checkpoint(tmp_path, "llama", max_position_embeddings=16_384)
    params = SamplingParams(max_tokens=1, temperature=0)
    peaks = []
    with LLM(tmp_path, drafter="none", prefix_cache_bytes=0) as llm:
        assert llm.engine.max_rows == MAX_CPU_ROWS
        use = llm.engine.memory_use()
        assert use is not None
        assert use.used["weights"] > 0
        assert sum(use.budgets.values()) == use.limit_bytes
        for length in LENGTHS:
            mx.reset_peak_memory()
            llm.generate([[7 + i % 90 for i in range(length)]], params)
            peaks.append(mx.get_peak_memory() - use.plan.weights)
    growth = [later - earlier for earlier, later in itertools.pairwise(peaks)]
    assert growth[0] > 0
    assert growth[1] < 2 * 1.25 * growth[0]
    assert growth[2] < 2 * 1.25 * growth[1], f"peaks {peaks} at {LENGTHS} tokens"
