"""The prefix cache through the whole engine, on a tiny real model: hits, restarts, clearing, other models."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_map

from outrider import LLM, InvalidConfig, SamplingParams
from outrider.cache.block_folder import KEY_FILE, SUFFIX
from outrider.cache.disk_tier import DiskTier
from outrider.engine.prefix import disk
from outrider.models.files.fingerprint import fingerprint
from patience import PATIENCE_S, wait_until
from server_process import write_tiny_model
from tiny_models import tiny_model, write_checkpoint

PROMPT = [5 + i * i % 90 for i in range(300)]
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module", params=["llama", "llama-4bit"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", name=request.param)


@pytest.fixture(autouse=True)
def patient_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take longer than these limits to write a block or to read it."""
    monkeypatch.setattr(disk, "FILE_TIMEOUT_S", PATIENCE_S)
    monkeypatch.setattr(DiskTier.close, "__defaults__", (PATIENCE_S,))


def _ask(llm: LLM, prompt: list[int] = PROMPT, params: SamplingParams = GREEDY) -> tuple[list[int], int]:
    """The answer, and how many of the prompt's tokens were not computed."""
    completion = llm.generate([prompt], params)[0]
    return completion.token_ids, completion.stats.num_cached


def _numbers(llm: LLM) -> dict[str, int]:
    status = llm.engine.prefix_status()
    assert status is not None
    return {**status.gauges(), **status.counts()}


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[int]:
    with LLM(folder, prefix_cache_bytes=0) as llm:
        assert llm.engine.prefix_status() is None
        assert _ask(llm)[1] == _ask(llm)[1] == 0
        return _ask(llm)[0]


def test_the_second_time_only_the_last_token_is_computed(folder: Path, expected: list[int]) -> None:
    with LLM(folder) as llm:
        assert _ask(llm) == (expected, 0)
        assert _ask(llm) == (expected, len(PROMPT) - 1)
        longer = PROMPT + expected + [7, 8, 9]
        assert _ask(llm, longer)[1] == len(PROMPT) + len(expected) - 1, "answers are cached too"
        assert _numbers(llm)["hit_tokens"] > 500


def test_another_salt_does_not_hit(folder: Path, expected: list[int]) -> None:
    salted = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, cache_salt="mine")
    with LLM(folder) as llm:
        _ask(llm)
        assert _ask(llm, params=salted) == (expected, 0)
        assert _ask(llm, params=salted) == (expected, len(PROMPT) - 1)


def test_requests_at_once_compute_their_common_part_once(folder: Path) -> None:
    prompts = [[*PROMPT, 3 + i, 4, 5] for i in range(6)]
    with LLM(folder) as llm, LLM(folder, prefix_cache_bytes=0) as plain:
        together = llm.generate(prompts, GREEDY)
        alone = plain.generate(prompts, GREEDY)
        assert [one.token_ids for one in together] == [one.token_ids for one in alone]
        assert sum(one.stats.num_cached for one in together) >= 5 * (len(PROMPT) - 1)


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_clearing_gives_the_memory_back(folder: Path, expected: list[int], tmp_path: Path) -> None:
    with LLM(folder, prefix_cache_dir=tmp_path) as llm:
        at_first = mx.get_active_memory()
        _ask(llm)
        held = _numbers(llm)["bytes"]
        assert held > 0
        assert llm.engine.clear_prefix_cache() == held
        assert _numbers(llm)["bytes"] == 0
        assert mx.get_active_memory() <= at_first + 100_000
        assert llm.engine._loop.parts.disk is not None
        assert llm.engine._loop.parts.disk.flush()
        assert [path.name for path in tmp_path.iterdir()] == [KEY_FILE]
        assert _ask(llm) == (expected, 0)


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_the_memory_stays_within_its_budget(folder: Path) -> None:
    with LLM(folder, prefix_cache_bytes=150_000) as llm:
        for i in range(12):
            _ask(llm, [i, *PROMPT[: 20 * i + 1]])
            numbers = _numbers(llm)
            assert 0 < numbers["bytes"] <= 150_000
        assert numbers["evictions"] > 0


def test_prefixes_outlive_the_process_that_made_them(
    folder: Path, expected: list[int], tmp_path: Path
) -> None:
    with LLM(folder, prefix_cache_dir=tmp_path) as llm:
        assert _ask(llm) == (expected, 0)
    with LLM(folder, prefix_cache_dir=tmp_path) as llm:
        answer, num_cached = _ask(llm)
        assert answer == expected
        assert num_cached == 256, "whole blocks are on disk"
        assert _numbers(llm)["disk_reads"] == 4


def test_another_models_prefixes_are_never_used(folder: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "other", "llama", max_position_embeddings=8192, rope_theta=5e5)
    with LLM(folder, drafter="none", prefix_cache_dir=tmp_path / "cache") as llm:
        _ask(llm)
    with LLM(tmp_path / "other", prefix_cache_dir=tmp_path / "cache") as llm:
        assert _ask(llm)[1] == 0
        assert _numbers(llm)["disk_bytes"] > 0


def test_damaged_files_cost_a_computation_and_no_token(
    folder: Path, expected: list[int], tmp_path: Path
) -> None:
    with LLM(folder, prefix_cache_dir=tmp_path) as llm:
        _ask(llm)
    for path in tmp_path.glob(f"*{SUFFIX}"):
        whole = bytearray(path.read_bytes())
        whole[-1] ^= 1
        path.write_bytes(whole)
    with LLM(folder, prefix_cache_dir=tmp_path) as llm:
        assert _ask(llm) == (expected, 0)
        assert _numbers(llm)["disk_refused"] > 0


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_a_folder_that_cannot_be_is_said_at_the_start(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "x").write_text("a file")
    with pytest.raises(InvalidConfig, match="the prefix cache cannot use the folder"):
        LLM(folder, prefix_cache_dir=tmp_path / "x")
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    with pytest.raises(InvalidConfig, match="other users may write to it"):
        LLM(folder, prefix_cache_dir=tmp_path / "shared")


KILLED = """
import sys
from outrider import LLM, SamplingParams
with LLM(sys.argv[1], prefix_cache_dir=sys.argv[2]) as llm:
    print("ready", flush=True)
    for i in range(10_000):
        prompt = [5 + j * j % 90 for j in range(300)] + [i % 90] * 3
        llm.generate([[i % 90, *prompt], prompt], SamplingParams(max_tokens=3, temperature=0))
"""


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_a_server_that_is_killed_leaves_only_good_blocks(
    folder: Path, expected: list[int], tmp_path: Path
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(folder), str(tmp_path)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    wait_until(lambda: len(list(tmp_path.iterdir())) >= 12)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with LLM(folder, prefix_cache_dir=tmp_path) as llm:
        answer, num_cached = _ask(llm)
        assert answer == expected
        assert num_cached > 0
        assert _numbers(llm)["disk_refused"] == 0


def test_the_fingerprint_sees_every_weight_and_every_fact() -> None:
    model = tiny_model("qwen3")
    name = fingerprint([model], "fact")
    assert fingerprint([tiny_model("qwen3")], "fact") == name
    assert fingerprint([model], "other fact") != name
    assert fingerprint([model, model], "fact") != name
    one = model.model.layers[1].self_attn.q_proj
    one.weight[3, 5] += 1e-6
    assert fingerprint([model], "fact") != name
    one.weight[3, 5] -= 1e-6
    one.weight = one.weight[::-1]
    assert fingerprint([model], "fact") != name, "the same values in other places"
    model = tiny_model("qwen3")
    model.update(tree_map(lambda x: x.astype(mx.bfloat16), model.parameters()))
    assert fingerprint([model], "fact") != name
