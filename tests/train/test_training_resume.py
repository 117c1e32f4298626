"""A run that is stopped and resumed is the run that was not stopped: same data, same losses, same head."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from outrider.progress import Progress, ignore
from outrider.train import checkpoint
from outrider.train.checkpoint import Milestone, TrainState
from outrider.train.errors import Interrupted, TrainingError
from outrider.train.evaluate import Acceptance
from outrider.train.run import Job, train_head
from tiny_models import write_checkpoint

ASKED = {"conversations": 24, "steps": 10, "batch_tokens": 96, "max_tokens": 40, "depths": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "tiny-qwen3"
    write_checkpoint(folder, "qwen3", num_hidden_layers=1)
    return folder


def _train(folder: Path, out: Path, resume: bool = False, stop_at: int | None = None, listener=ignore):  # type: ignore[no-untyped-def]
    """Losses by step, until the end or until the step before which Ctrl-C is pressed."""
    losses = {}

    def on_step(step: int, loss: object) -> None:
        losses[step] = loss
        if step == stop_at:
            raise KeyboardInterrupt  # in the middle of the step: it does not count

    try:
        train_head(Job(folder, {} if resume else ASKED, out, resume=resume), listener, on_step)
    except Interrupted as stop:
        return losses, str(stop)
    return losses, ""


def _tensors(out: Path) -> dict[str, np.ndarray]:
    return {name: np.array(array) for name, array in mx.load(str(out)).items()}


def test_a_resumed_run_equals_an_uninterrupted_one(folder: Path, tmp_path: Path) -> None:
    whole, _ = _train(folder, tmp_path / "whole.safetensors")
    assert sorted(whole) == list(range(1, 11))

    out = tmp_path / "parts.safetensors"
    first, stopped = _train(folder, out, stop_at=4)
    assert stopped == "after 3 training steps"
    assert not out.exists()
    second, stopped = _train(folder, out, resume=True, stop_at=8)
    assert stopped == "after 7 training steps"
    third, _ = _train(folder, out, resume=True)
    assert sorted(second) == [4, 5, 6, 7, 8]
    assert sorted(third) == [8, 9, 10]
    assert {**first, **second, **third} == whole

    parts, wholes = _tensors(out), _tensors(tmp_path / "whole.safetensors")
    assert parts.keys() == wholes.keys()
    for name, array in parts.items():
        np.testing.assert_array_equal(array, wholes[name])
    assert not out.with_suffix(".training").exists()


def test_prompts_of_the_user_are_answered_and_trained_on(folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(f"prompt number {i}" for i in range(30)))
    out = tmp_path / "head.safetensors"
    _, figures = train_head(Job(folder, {"steps": 1, "batch_tokens": 64}, out, prompts))
    assert figures.num_held_out == 3
    assert out.is_file()


def test_synthesis_can_be_stopped_too(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "head.safetensors"
    file = out.with_suffix(".training") / "conversations.jsonl"

    def stop_midway(progress: Progress) -> None:
        if progress.stage == "Synthesising" and progress.done == 10:
            raise KeyboardInterrupt

    _, stopped = _train(folder, out, listener=stop_midway)
    assert stopped == "with 10 conversations"
    with open(file, "a") as sink:
        sink.write('{"number": 23, "exchan')  # killed while it wrote
    resumed: list[float] = []
    _train(folder, out, resume=True, stop_at=1, listener=lambda progress: resumed.append(progress.done))
    assert resumed[0] == 10
    kept = sorted(file.read_text().splitlines())

    other = tmp_path / "other.safetensors"
    _train(folder, other, stop_at=1)
    assert kept == sorted((other.with_suffix(".training") / "conversations.jsonl").read_text().splitlines())


def test_a_resumed_run_keeps_its_settings(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "head.safetensors"
    _train(folder, out, stop_at=1)
    with pytest.raises(TrainingError, match="begun with --steps 10, not 20"):
        train_head(Job(folder, {"steps": 20}, out, resume=True))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a\nb\nc\nd\ne\nf\ng\nh\n")
    with pytest.raises(TrainingError, match="other prompts"):
        train_head(Job(folder, {}, out, prompts, resume=True))
    with pytest.raises(TrainingError, match="--resume"):
        train_head(Job(folder, ASKED, out))
    other = tmp_path / "llama"
    write_checkpoint(other, "llama")
    with pytest.raises(TrainingError, match="another model"):
        train_head(Job(other, {}, out, resume=True))


def test_ctrl_c_says_how_to_go_on(folder: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "head.safetensors")
    command = [sys.executable, "-m", "outrider", "mtp", "train", str(folder), "--out", out]
    options = ["--conversations", "24", "--seconds", "300", "--batch-tokens", "96", "--max-tokens", "40"]
    with subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while "Training" not in (line := process.stderr.readline()):
            assert line, "it ended too soon"
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
    assert process.returncode == 130
    assert "Traceback" not in said
    assert f"Continue with: outrider mtp train {folder} --out {out} --resume" in said
    assert checkpoint.load(Path(out).with_suffix(".training")) is not None


def test_a_checkpoint_is_read_as_it_was_written(tmp_path: Path) -> None:
    tree = {"layers": [{"w": mx.random.normal((3, 2))}], "norm": mx.ones(3)}
    milestone = Milestone(5, Acceptance(7, (7, 6), (3, 1)))
    state = TrainState(5, tree, {"states": [{"step": mx.array(5)}]}, 1234, 0.1 + 0.2, (milestone,))
    checkpoint.save(tmp_path, state)
    loaded = checkpoint.load(tmp_path)
    assert loaded is not None
    assert (loaded.step, loaded.num_targets, loaded.trained_s) == (5, 1234, 0.1 + 0.2)
    assert loaded.milestones == (milestone,)
    np.testing.assert_array_equal(np.array(loaded.head["layers"][0]["w"]), np.array(tree["layers"][0]["w"]))
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint.FILE_NAME]


@pytest.mark.parametrize("kept", [0, 7, 100])
def test_a_damaged_checkpoint_is_named(tmp_path: Path, kept: int) -> None:
    checkpoint.save(tmp_path, TrainState(1, {"w": mx.ones(9)}, {"s": mx.ones(9)}))
    file = tmp_path / checkpoint.FILE_NAME
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(TrainingError, match="is damaged"):
        checkpoint.load(tmp_path)
