"""Bits of keys and values from the outside: `LLM(kv_bits=...)`."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider import LLM, SamplingParams
from outrider.config import InvalidConfig
from outrider.cpu.extension import extension
from tiny_models import VOCAB_SIZE, write_checkpoint

PROMPT = [(5 * i * i + i + 7) % VOCAB_SIZE for i in range(150)]
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    write_checkpoint(path, "llama-4bit", head_dim=64)
    return path


def test_answers_depend_on_the_precision_and_on_nothing_else(folder: Path) -> None:
    prompts = [PROMPT, PROMPT[:70], [*PROMPT[:100], 3, 4], PROMPT[90:]]
    answers = {}
    for bits in (32, 16, 8, 4):
        with LLM(folder, kv_bits=bits) as llm:
            assert llm.engine.facts.kv_bits == (None if bits == 32 else bits)
            alone = [llm.generate([prompt], GREEDY)[0].token_ids for prompt in prompts]
            together = [one.token_ids for one in llm.generate(prompts, GREEDY)]
        with LLM(folder, kv_bits=bits, prefix_cache_bytes=0, prefill_step_size=17) as llm:
            uncached = [one.token_ids for one in llm.generate(prompts, GREEDY)]
        assert alone == together == uncached
        answers[bits] = alone
    assert answers[4] != answers[32]  # of random weights: a rounding shows


def test_rows_hold_fewer_bytes(folder: Path) -> None:
    held = {}
    for bits in (32, 16, 8, 4):
        with LLM(folder, kv_bits=bits) as llm:
            llm.generate([PROMPT], GREEDY)
            status = llm.engine.prefix_status()
            assert status is not None
            held[bits] = status.gauges()["bytes"]
    assert held[16] == held[32] / 2
    assert held[8] <= 0.29 * held[32]
    assert held[4] <= 0.16 * held[32]


def test_prefixes_of_another_precision_are_never_used(folder: Path, tmp_path: Path) -> None:
    def cached_tokens(bits: int | None) -> int:
        with LLM(folder, kv_bits=bits, prefix_cache_dir=tmp_path) as llm:
            return llm.generate([PROMPT], GREEDY)[0].stats.num_cached

    assert [cached_tokens(bits) for bits in (8, 4, 16, 32)] == [0, 0, 0, 0]
    assert all(cached_tokens(bits) >= 64 for bits in (8, 4, 16, 32))


@pytest.mark.skipif(extension() is None, reason="no native extension: no compiler, or not Linux")
def test_quantised_models_on_cpus_have_16_bits(folder: Path) -> None:
    with LLM(folder) as llm:
        assert llm.engine.facts.kv_bits == 16


@pytest.mark.parametrize("name", ["llama", "gpt_oss-mxfp4"])
def test_other_models_keep_their_dtype(name: str, tmp_path: Path) -> None:
    """Those in float32, and those whose attention would convert the cells in every pass."""
    write_checkpoint(tmp_path, name)
    with LLM(tmp_path) as llm:
        assert llm.engine.facts.kv_bits is None


def test_more_bits_than_the_model_computes_with_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    with pytest.raises(InvalidConfig, match="kv_bits=32: llama computes in bfloat16, which has 16 bits"):
        LLM(tmp_path, kv_bits=32, dtype="bfloat16")
    with LLM(tmp_path, kv_bits=16, dtype="bfloat16") as llm:
        assert llm.engine.facts.kv_bits is None


def test_a_model_that_cannot_take_it_is_refused_at_the_start(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    with pytest.raises(InvalidConfig, match=r"kv_bits=8: llama has keys of 16 elements.*multiple of 32"):
        LLM(tmp_path, kv_bits=8)
    with pytest.raises(InvalidConfig, match="kv_bits must be one of 4, 8, 16, 32, or None, not 3"):
        LLM(tmp_path, kv_bits=3)


def test_a_model_without_keys_and_values_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "mamba2")
    with pytest.raises(InvalidConfig, match="no layer of mamba2 stores keys and values"):
        LLM(tmp_path, kv_bits=8)
