"""Models on several ranks (MLX's ring on loopback): the tokens are those of one rank."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from adapter_files import write_adapter
from models.head_checkpoints import tiny_head
from outrider import LLM
from patience import IN_SOAK, case_only_in_soak, wait_until
from rank_processes import run_ranks
from ranks_program import SETTINGS, answers, image_answers
from server_process import ServerProcess, serving
from test_head_layouts_served import write_model
from tiny_models import write_checkpoint
from tiny_vision import write_vision_checkpoint

PROGRAM = Path(__file__).with_name("ranks_program.py")
PATIENCE_S = 240


def answers_of_ranks(num: int, folder: Path, settings: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """What rank 0 found."""
    (folder / "settings.json").write_text(json.dumps(settings))
    out = tmp_path / "out.json"
    run_ranks(num, PROGRAM, folder, out)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


CASES = [
    ("llama", 2, {"drafter": "ngram"}),
    case_only_in_soak("qwen3_5", 2, {}),  # recurrent layers, and a head that drafts
    case_only_in_soak("llama", 4, {"drafter": "ngram"}),
    case_only_in_soak("qwen3_moe", 2, {"drafter": "ngram"}),
    case_only_in_soak("llama", 2, {"drafter": "ngram", "kv_bits": 8}),
]


@pytest.mark.parametrize(("family", "num_ranks", "settings"), CASES)
def test_several_ranks_give_the_tokens_of_one(
    tmp_path: Path, family: str, num_ranks: int, settings: dict[str, Any]
) -> None:
    folder = tmp_path / "model"
    if family == "qwen3_5":
        tiny = tiny_head(family, 1)
        write_model(folder, tiny, tiny.converted())
    else:
        write_checkpoint(folder, family, num_key_value_heads=4, num_attention_heads=8, head_dim=32)
    found = answers_of_ranks(num_ranks, folder, settings, tmp_path)
    with LLM(folder, **SETTINGS, **settings) as llm:
        assert found["answers"] == answers(llm, drafts=False)


@pytest.mark.parametrize("family", [case_only_in_soak("llama"), case_only_in_soak("qwen3_moe")])
def test_rows_with_adapters_on_all_ranks(tmp_path: Path, family: str) -> None:
    folder = tmp_path / "model"
    sizes: dict[str, Any] = {"num_key_value_heads": 4, "num_attention_heads": 8, "head_dim": 32}
    keys = [f"self_attn.{name}_proj" for name in "qkvo"] + (["mlp.down_proj"] if family == "llama" else [])
    adapters = {}
    for name, kind in (("first", "lora"), ("second", "dora")):
        model = write_checkpoint(folder, family, **sizes)
        adapters[name] = str(write_adapter(tmp_path / name, model, kind=kind, keys=keys, seed=name))
    settings = {"drafter": "ngram", "adapters": adapters}
    found = answers_of_ranks(2, folder, settings, tmp_path)["answers"]
    with LLM(folder, **SETTINGS, **settings) as llm:
        assert found == answers(llm, drafts=False)
    with LLM(folder, **SETTINGS) as llm:
        assert found != answers(llm, drafts=False)


@pytest.mark.parametrize("family", [case_only_in_soak("smolvlm"), case_only_in_soak("qwen3_5")])
def test_images_are_read_on_all_ranks(tmp_path: Path, family: str) -> None:
    folder = tmp_path / "model"
    write_vision_checkpoint(folder, family)
    found = answers_of_ranks(2, folder, {}, tmp_path)["answers"]
    with LLM(folder, **SETTINGS) as llm:
        assert found == image_answers(llm)
    assert found[0] != found[1]


@pytest.mark.soak
@pytest.mark.skipif(not IN_SOAK, reason="starts three groups of ranks: runs under `make soak` only")
def test_cached_prefixes_come_back_from_the_disks_of_all_ranks(tmp_path: Path) -> None:
    model, disk = tmp_path / "model", tmp_path / "disk"
    write_checkpoint(model, "llama", num_key_value_heads=4, num_attention_heads=8, head_dim=32)
    settings = {"drafter": "ngram", "prefix_cache_dir": str(disk)}
    first = answers_of_ranks(2, model, settings, tmp_path)
    files = [sorted((disk / f"rank-{rank}-of-2").glob("*.safetensors")) for rank in range(2)]
    assert len(files[0]) == len(files[1]) > 0
    assert {file.name for file in files[0]} == {file.name for file in files[1]}
    second = answers_of_ranks(2, model, settings, tmp_path)
    assert second["answers"] == first["answers"]
    assert second["hits"]["hit_tokens"] > first["hits"]["hit_tokens"]
    for file in files[1]:
        file.unlink()
    third = answers_of_ranks(2, model, settings, tmp_path)
    assert third["answers"] == first["answers"]
    assert third["hits"]["hit_tokens"] == first["hits"]["hit_tokens"]
    assert all(file.exists() for file in files[1]), "the blocks are written again"


def served_text(server: ServerProcess) -> str:
    body = {"prompt": "the ranks", "max_tokens": 12, "temperature": 0}
    response = server.post("/v1/completions", body)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


def other_ranks(folder: Path) -> list[int]:
    """The processes of ranks that a server of this model has started."""
    found = subprocess.run(["pgrep", "-f", f"serve {folder}"], capture_output=True, text=True, check=False)
    pids = [int(pid) for pid in found.stdout.split() if int(pid) != os.getpid()]
    return [pid for pid in pids if b"OUTRIDER_FIRST_RANK=" in Path(f"/proc/{pid}/environ").read_bytes()]


@pytest.mark.soak
@pytest.mark.skipif(not IN_SOAK, reason="waiting ranks take whole cores: runs under `make soak` only")
@pytest.mark.skipif(not Path("/proc").exists(), reason="finds the ranks' processes in /proc")
def test_a_server_comes_back_after_the_loss_of_a_rank(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_checkpoint(folder, "llama", num_key_value_heads=4, num_attention_heads=8)
    with serving(folder) as alone:
        want = served_text(alone)
    with serving(folder, "--tensor-parallel", "2") as server:
        assert served_text(server) == want
        (rank_1,) = other_ranks(folder)
        os.kill(rank_1, signal.SIGKILL)
        wait_until(lambda: other_ranks(folder) not in ([], [rank_1]))
        assert served_text(server) == want


@pytest.mark.soak
@pytest.mark.skipif(not IN_SOAK, reason="waiting ranks take whole cores: runs under `make soak` only")
def test_ranks_that_do_not_divide_the_heads_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_checkpoint(folder, "llama", num_key_value_heads=4, num_attention_heads=8)
    command = [
        sys.executable,
        "-m",
        "outrider",
        "serve",
        str(folder),
        "--port",
        "0",
        "--tensor-parallel",
        "3",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode != 0
    assert "3 ranks do not divide it evenly" in done.stdout + done.stderr
