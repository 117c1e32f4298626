"""Models on several ranks (MLX's ring on loopback): the tokens are those of one rank."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from adapter_files import write_adapter
from media_world import new_world
from models.head_checkpoints import tiny_head
from outrider import LLM, SamplingParams
from outrider.models.errors import ModelUnavailable
from outrider.models.files import default_model
from patience import IN_SOAK, case_only_in_soak, wait_until
from rank_processes import run_ranks
from ranks_program import SETTINGS, answers, image_answers
from server_process import ServerProcess, serving
from test_head_layouts_served import write_model
from tiny_models import write_checkpoint
from tiny_vision import write_vision_checkpoint

PROGRAM = Path(__file__).with_name("ranks_program.py")
PATIENCE_S = 240
SIZES: dict[str, Any] = {"num_key_value_heads": 4, "num_attention_heads": 8, "head_dim": 32}
NEAR_TIE = 0.01  # logprobs of quantised models differ by less on several ranks (docs/DEPLOYMENT.md)


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
        write_checkpoint(folder, family, **SIZES)
    found = answers_of_ranks(num_ranks, folder, settings, tmp_path)
    with LLM(folder, **SETTINGS, **settings) as llm:
        assert found["answers"] == answers(llm, drafts=False)


@pytest.mark.parametrize("family", [case_only_in_soak("llama"), case_only_in_soak("qwen3_moe")])
def test_rows_with_adapters_on_all_ranks(tmp_path: Path, family: str) -> None:
    folder = tmp_path / "model"
    keys = [f"self_attn.{name}_proj" for name in "qkvo"] + (["mlp.down_proj"] if family == "llama" else [])
    adapters = {}
    for name, kind in (("first", "lora"), ("second", "dora")):
        model = write_checkpoint(folder, family, **SIZES)
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
@pytest.mark.skipif(not IN_SOAK, reason="starts two groups of ranks: runs under `make soak` only")
@pytest.mark.parametrize("family", ["smolvlm", "qwen3_5"])
def test_a_divided_head_is_fed_images_too(tmp_path: Path, family: str) -> None:
    folder = new_world(tmp_path, family).folder
    whole, divided = (
        answers_of_ranks(2, folder, {"rank_head": name}, tmp_path) for name in ("whole", "divided")
    )
    assert [one["rank_head"] for one in (whole, divided)] == ["whole", "divided"]
    assert divided["answers"] == whole["answers"]
    assert len(divided["drafts"]) > 10
    assert divided["drafts"] == whole["drafts"]


@pytest.mark.soak
@pytest.mark.skipif(not IN_SOAK, reason="starts three groups of ranks: runs under `make soak` only")
def test_cached_prefixes_come_back_from_the_disks_of_all_ranks(tmp_path: Path) -> None:
    model, disk = tmp_path / "model", tmp_path / "disk"
    write_checkpoint(model, "llama", **SIZES)
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


# -- servers ---------------------------------------------------------------------------------------------


QUESTION = {"prompt": "a rank", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


def served_text(server: ServerProcess) -> str:
    response = server.post("/v1/completions", QUESTION)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


@contextmanager
def endless_answer(server: ServerProcess, **fields: Any) -> Iterator[Iterator[str]]:
    """The pieces of an answer that goes on until the block is left."""
    body = QUESTION | {"max_tokens": 8000, "stream": True} | fields
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S) as response:
        events = (line for line in response.iter_lines() if line.startswith("data: "))
        yield (json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events)


def text_of_one_rank(llm: LLM, adapter: str | None) -> str:
    """The answer to QUESTION. It has no near tie, so other ranks have to give the same tokens."""
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=2, adapter=adapter)
    (found,) = llm.generate(QUESTION["prompt"], params)
    tops = [[logprob for _, logprob in token.top] for token in found.logprobs or ()]
    assert min(first - second for first, second, *_ in tops) > NEAR_TIE, "choose another prompt"
    return found.text


def refusal(response: httpx.Response, status: int) -> str:
    assert response.status_code == status, response.text
    message: str = response.json()["error"]["message"]
    return message


def test_a_server_on_ranks_answers_with_and_without_an_adapter_in_one_batch(tmp_path: Path) -> None:
    """Quantised weights. A row that names the adapter decodes beside one that names none."""
    folder, adapter = tmp_path / "tiny", tmp_path / "sql"
    sizes = SIZES | {"intermediate_size": 128, "max_position_embeddings": 8192}
    write_adapter(adapter, write_checkpoint(folder, "llama-4bit", **sizes), scale=6.0)
    with LLM(folder, adapters={"sql": adapter}, drafter="none") as llm:
        plain, adapted = (text_of_one_rank(llm, name) for name in (None, "sql"))
    assert plain != adapted
    flags = ("--tensor-parallel", "2", "--adapters", f"sql={adapter}", "--drafter", "none")
    with serving(folder, *flags) as server:
        with endless_answer(server, model="tiny:sql") as pieces:
            found = next(pieces)
            assert served_text(server) == plain
            assert server.get("/v1/status")["live_requests"] == 1
            while len(found) < len(adapted):
                found += next(pieces)
            assert found.startswith(adapted)
        server.wait_until_idle()
        unknown = server.post("/v1/completions", QUESTION | {"adapter": "poem"})
        assert refusal(unknown, 404) == "there is no adapter 'poem' on this server. Loaded adapters: sql."
        later = server.post("/v1/adapters", {"name": "poem", "path": str(adapter)})
        assert "Name them when it starts (--adapters NAME=DIR)" in refusal(later, 403)
        gone = httpx.delete(f"{server.url}/v1/adapters/sql", timeout=PATIENCE_S)
        assert "on several ranks adapters are not unloaded" in refusal(gone, 409)
        unloaded = server.post("/v1/models/tiny/unload", {})
        assert "'tiny' stays loaded: it is pinned (--pin), or runs on several ranks" in refusal(unloaded, 409)
        assert served_text(server) == plain


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
@pytest.mark.skipif(not IN_SOAK, reason="starts several groups of ranks: runs under `make soak` only")
@pytest.mark.parametrize("rank_head", ["auto", "whole", "divided"])
def test_a_server_says_where_the_head_is(tmp_path: Path, rank_head: str) -> None:
    folder = tmp_path / "model"
    tiny = tiny_head("qwen3_5", 1)
    write_model(folder, tiny, tiny.converted())
    with serving(folder, "--draft-depth", "3") as alone:
        want = served_text(alone)
        assert alone.get("/v1/status")["model"]["rank_head"] is None
    flags = ("--tensor-parallel", "2", "--rank-head", rank_head, "--draft-depth", "3")
    with serving(folder, *flags) as server:
        assert served_text(server) == want
        model = server.get("/v1/status")["model"]
        assert sum(server.get("/v1/status")["drafted_by_position"]) > 0
    reason = "measured: a draft takes" if rank_head == "auto" else f"--rank-head {rank_head}"
    assert model["rank_head_reason"].startswith(reason)
    assert model["rank_head"] in (("whole", "divided") if rank_head == "auto" else (rank_head,))
    assert f"({model['rank_head']}; {model['rank_head_reason']})" in server.banner


@pytest.mark.soak
@pytest.mark.skipif(not IN_SOAK, reason="three ranks of a real model: runs under `make soak` only")
def test_the_default_model_on_three_ranks_answers_as_on_one() -> None:
    """Its 9 heads and 3 KV heads are divided. The shipped head drafts on rank 0."""
    try:
        folder = default_model.ensure()
    except ModelUnavailable as error:
        pytest.skip(f"the default model cannot be fetched here: {error}")
    question = {"messages": [{"role": "user", "content": "What is the capital of Japan?"}]}
    texts = []
    for flags in ((), ("--tensor-parallel", "3")):
        with serving(folder, *flags) as server:
            response = server.post("/v1/chat/completions", question | {"temperature": 0, "max_tokens": 24})
            assert response.status_code == 200, response.text
            texts.append(response.json()["choices"][0]["message"]["content"])
    assert texts[0] == texts[1]
    assert "Tokyo" in texts[0]


REFUSALS = {  # flags of the server; what it says
    ("--rank-head", "divided"): "(--rank-head) is for a model on several ranks, and this is one",
    ("--tensor-parallel", "2", "--rank-head", "divided"): "has no MTP head (drafter: auto)",
    ("--tensor-parallel", "3"): "3 ranks do not divide it evenly",
    ("--tensor-parallel", "2", "--draft-model", "x"): "--draft-model cannot be used on several ranks",
}


@pytest.mark.soak
@pytest.mark.skipif(not IN_SOAK, reason="starts many processes: runs under `make soak` only")
@pytest.mark.parametrize("flags", REFUSALS)
def test_what_ranks_cannot_do_is_refused_at_start(tmp_path: Path, flags: tuple[str, ...]) -> None:
    folder = tmp_path / "model"
    write_checkpoint(folder, "llama", **SIZES)
    command = [sys.executable, "-m", "outrider", "serve", str(folder), "--port", "0", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 2
    assert REFUSALS[flags] in done.stdout + done.stderr
