"""What a user can get wrong, and what is said about it: one clear line, before any work is done."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import mlx.core as mx
import pytest

from outrider.cli.main import main
from outrider.train.errors import TrainingError
from outrider.train.output_files import write_tensors
from outrider.train.prompts import read_prompts
from outrider.train.run_folder import RunFolder
from tiny_models import tiny_config, write_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "tiny-llama"
    write_checkpoint(folder, "llama", num_hidden_layers=1)
    return folder


def _refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["mtp", "train", *map(str, words)]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("outrider: ")
    return said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--conversations", "3"], "--conversations must be at least 20"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--seconds", "-1"], "--seconds must be above 0"),
        (["--seconds", "nan"], "--seconds must be above 0"),
        (["--batch-tokens", "1"], "--batch-tokens must be at least 16"),
        (["--depths", "9"], "--depths must be 1..8"),
        (["--depths", "0"], "--depths must be 1..8"),
        (["--learning-rate", "0"], "--learning-rate must be above 0"),
        (["--max-tokens", "1"], "--max-tokens must be at least 4"),
        (["--out", "head.bin"], "ends with .safetensors"),
        (["--resume"], "nothing to resume"),
        (["--prompts", "no/such/file.txt"], "cannot be read"),
    ],
)
def test_options_that_make_no_sense(
    capsys: pytest.CaptureFixture[str], folder: Path, options: list[str], message: str
) -> None:
    assert message in _refused(capsys, folder, *options)
    assert not (folder / "mtp" / "weights.safetensors").exists()


def test_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "no such folder" in _refused(capsys, tmp_path / "none")


def test_a_family_that_is_not_served(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("mamba")))
    assert "'mamba' is not served" in _refused(capsys, tmp_path)


def test_a_family_whose_layer_cannot_be_a_head(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "gpt2")
    assert "MTP head" in _refused(capsys, tmp_path)


def test_an_existing_head_is_not_replaced(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    (tmp_path / "mtp.safetensors").write_text("mine")
    assert "exists already" in _refused(capsys, tmp_path)
    (tmp_path / "other.safetensors").write_text("mine")
    assert "exists already" in _refused(capsys, tmp_path, "--out", tmp_path / "other.safetensors")


def test_a_read_only_model_needs_another_place(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "name a file for the head with --out" in _refused(capsys, folder)


def test_a_place_that_cannot_be_written(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot be written" in _refused(capsys, folder, "--out", tmp_path / "file" / "head.safetensors")


def test_too_little_data(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path) -> None:
    options = ["--conversations", 20, "--max-tokens", 4, "--out", tmp_path / "head.safetensors"]
    assert "Too little data" in _refused(capsys, folder, *options)


def test_one_process_trains_at_a_time(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "head.safetensors"
    with RunFolder(out).locked():
        assert "Another process" in _refused(capsys, folder, "--out", out)


# prompt files


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("one\ntwo\n", "holds 2 prompts; at least 8"),
        ("", "holds 0 prompts"),
        ('ok\n{"prompt": \n', "line 2: not valid JSON"),
        ('{"question": "x"}', 'line 1: needs "prompt"'),
        ('{"prompt": 3}', "needs"),
        ('{"messages": []}', "needs"),
        ('{"messages": ["hi"]}', "needs"),
        ('{"messages": [{"role": "user"}]}', "needs"),
        ('{"messages": [{"role": "assistant", "content": "hi"}]}', "no message to answer"),
    ],
)
def test_a_prompt_file_that_cannot_be_used(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(TrainingError) as caught:
        read_prompts(path)
    assert message in str(caught.value)


def test_a_prompt_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"\xff\xfe\x00 not text \x80")
    with pytest.raises(TrainingError, match="cannot be read"):
        read_prompts(path)


def test_a_prompt_longer_than_the_context_is_named(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(["short"] * 8 + ["long " * 100]))
    assert "Prompt 9 cannot be used" in _refused(
        capsys, folder, "--prompts", path, "--out", tmp_path / "head.safetensors"
    )


def test_prompts_are_read_in_every_form(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    history = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    lines = [
        "plain text",
        "",
        json.dumps({"prompt": "in JSON"}),
        json.dumps({"messages": history}),
        json.dumps({"messages": [*history, {"role": "assistant", "content": "dropped"}]}),
        *"abcd",
    ]
    path.write_text("\n".join(lines))
    prompts = read_prompts(path)
    assert len(prompts) == 8
    assert prompts[:4] == [
        [{"role": "user", "content": "plain text"}],
        [{"role": "user", "content": "in JSON"}],
        history,
        history,
    ]


# files


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "head.safetensors"
    write_tensors(path, {"a": mx.ones(4)}, {})
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TrainingError, match="No space left"):
        write_tensors(path, {"a": mx.zeros(4)}, {})
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["head.safetensors"]
