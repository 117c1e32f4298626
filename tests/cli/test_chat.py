"""The terminal chat as a user runs it: a process with a prompt, an answer and a clean exit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import outrider.llm as llm_module
from outrider.cli import chat_backends
from outrider.cli.main import main
from outrider.config import InvalidConfig
from outrider.request import SamplingParams
from patience import PATIENCE_S, in_test_or_soak
from server_process import outrider
from tiny_models import write_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_checkpoint(folder, "llama")
    return folder


def test_chat_answers_and_leaves_cleanly(folder: Path) -> None:
    result = outrider(
        "chat", str(folder), "--max-tokens", "5", "--drafter", "ngram", stdin="hello\n/reset\nagain\n/quit\n"
    )
    assert result.returncode == 0, result.stderr
    assert "float32 on cpu, n-gram lookup" in result.stdout
    assert result.stdout.count("tokens/s") == 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["chat", "no/such/folder"], "no such folder"),
        (["chat", "FOLDER", "--drafter", "mtp"], "needs an MTP head"),
        (["chat", "FOLDER", "--temperature", "-1"], "temperature"),
        (["chat", "FOLDER", "--draft-depth", "9"], "draft_depth"),
        (["chat", "FOLDER", "--head", "none.safetensors"], "no such head file"),
    ],
)
def test_bad_input_is_one_clear_line(
    folder: Path, args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(folder) if arg == "FOLDER" else arg for arg in args]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


class FakeLLM:
    """An LLM whose model recommends temperature 0.2 and top_p 0.9."""

    def __init__(self, model: str | None, **options: Any) -> None:
        self.options = options

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams(temperature=0.2, top_p=0.9)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], SamplingParams(temperature=0.2, top_p=0.9, max_tokens=512)),
        (["--temperature", "0"], SamplingParams(temperature=0, top_p=0.9, max_tokens=512)),
        (
            ["--top-p", "1", "--max-tokens", "9", "--seed", "3", "--draft-depth", "2"],
            SamplingParams(temperature=0.2, top_p=1, max_tokens=9, seed=3, draft_depth=2),
        ),
        (["--draft-depth", "auto"], SamplingParams(temperature=0.2, top_p=0.9, max_tokens=512)),
    ],
)
def test_values_that_are_not_given_are_the_models(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], expected: SamplingParams
) -> None:
    used: list[SamplingParams] = []

    def backend(llm: FakeLLM, params: SamplingParams) -> None:
        used.append(params)
        raise InvalidConfig("far enough")

    monkeypatch.setattr(llm_module, "LLM", FakeLLM)
    monkeypatch.setattr(chat_backends, "LocalBackend", backend)
    assert main(["chat", *flags]) == 2
    assert used == [expected]


@pytest.mark.soak
def test_a_script_that_never_closes_its_llm_exits_cleanly(folder: Path) -> None:
    script = (
        "from outrider import LLM, SamplingParams\n"
        f"llm = LLM({str(folder)!r})\n"
        "print(len(llm.generate('hi', SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids))\n"
    )
    for _ in range(in_test_or_soak(1, 3)):
        result = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert (result.returncode, result.stdout) == (0, "3\n"), result.stderr
