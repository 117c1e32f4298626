"""`outrider mtp train` as a user runs it: a head that is found, accepted drafts, a folder left tidy."""

from __future__ import annotations

import json

import mlx.core as mx

from conftest import TRAIN_OPTIONS, Trained
from outrider import LLM, SamplingParams
from outrider.models import heads, loader
from tiny_models import VOCAB_SIZE


def _metadata(trained: Trained) -> dict[str, str]:
    _, metadata = mx.load(str(trained.head), return_metadata=True)
    return metadata


def test_held_out_drafts_stand_far_more_often_than_at_the_start(trained: Trained) -> None:
    figures = json.loads(_metadata(trained)["figures"])
    start = next(line for line in trained.stdout.splitlines() if "at the start" in line)
    assert int(start.split("%")[0].split()[-1]) < 25
    assert min(figures["acceptance_rates"]) > 0.5
    assert figures["tokens_per_step"] > 1.9
    assert figures["training_steps"] == TRAIN_OPTIONS["steps"]


def test_the_engine_drafts_with_the_head(trained: Trained) -> None:
    questions = [[{"role": "user", "content": word}] for word in ("sing", "why", "go on", "hello there")]
    with LLM(trained.folder) as llm:
        assert llm.engine.facts.drafter == "mtp"
        drafted = llm.chat(questions, SamplingParams(max_tokens=40, temperature=0, draft_depth=3))
    with LLM(trained.folder, drafter="none") as llm:
        plain = llm.chat(questions, SamplingParams(max_tokens=40, temperature=0))
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
    accepted = sum(one.stats.accepted[0] for one in drafted)
    assert accepted > 0.4 * sum(one.stats.drafted[0] for one in drafted)
    assert sum(one.stats.steps for one in drafted) < 0.7 * sum(one.stats.steps for one in plain)


def test_the_file_is_a_head_of_this_model_with_its_draft_vocabulary(trained: Trained) -> None:
    tensors = mx.load(str(trained.head))
    assert all(name.startswith("mtp.") for name in tensors)
    assert {array.dtype for name, array in tensors.items() if name != "mtp.draft_ids"} == {mx.float16}
    assert tensors["mtp.draft_ids"].dtype == mx.int32
    assert 20 <= tensors["mtp.draft_ids"].size <= VOCAB_SIZE // 2
    space = 4 + 94  # the most frequent of a chant's characters
    assert space in tensors["mtp.draft_ids"][:3].tolist()
    loaded = loader.load(trained.folder)
    assert heads.load_head(trained.head, loaded.trunk).draft_ids is not None
    metadata = _metadata(trained)
    assert metadata["trunk"] == "tiny-talker"
    assert len(metadata["trunk_config_sha256"]) == 64
    assert json.loads(metadata["settings"])["seed"] == TRAIN_OPTIONS["seed"]


def test_nothing_else_is_left_behind(trained: Trained) -> None:
    assert [path.name for path in trained.head.parent.iterdir()] == ["weights.safetensors"]


def test_progress_without_a_terminal_is_a_line_a_milestone(trained: Trained) -> None:
    lines = trained.stderr.splitlines()
    assert lines[0].startswith("Synthesising: 0/60 conversations")
    milestones = [line for line in lines if "accepted drafts" in line]
    assert len(milestones) == 10
    assert f"{TRAIN_OPTIONS['steps']}/{TRAIN_OPTIONS['steps']} steps, loss" in milestones[-1]
    assert "Written:" in trained.stdout
    assert f"outrider chat {trained.folder}" in trained.stdout
