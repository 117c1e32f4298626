"""An engine as on a GPU, on the CPU: its layers are merged, its tokens are those of an engine without."""

from __future__ import annotations

from pathlib import Path

import mlx.nn as nn
import pytest

from models.head_checkpoints import QWENS, tiny_head
from outrider.cpu import fast_math
from outrider.models import machine, merged_linear
from outrider.models.heads import LoadedHead
from outrider.step.runner import Runner
from patience import in_test_or_soak
from step import histories
from step.histories import Tally, World, play, random_history
from test_head_layouts_served import answers, write_model
from tiny_models import is_quantized_name


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_math, "applies", lambda: False)
    monkeypatch.setattr(machine, "outruns_host", lambda: True)
    monkeypatch.setattr(histories, "settle_dtype", lambda *_: None)  # quantised layers stay MLX's own


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", "glm4_moe", "deepseek_v3"])
def test_merged_layers_change_no_token(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = tiny_head(family)
    head = tiny.converted() if family in QWENS else tiny.published()
    folder = write_model(tmp_path / "model", tiny, head)
    monkeypatch.setattr(fast_math, "applies", lambda: False)
    plain, _ = answers(folder)
    merged: list[nn.Module] = []
    merge = merged_linear.merge
    monkeypatch.setattr(merged_linear, "merge", lambda model, run: (merge(model, run), merged.append(model)))
    monkeypatch.setattr(machine, "outruns_host", lambda: True)
    assert answers(folder)[0] == plain
    assert len(merged) >= 2  # the trunk, and each layer of its head
    for model in merged:
        assert any(isinstance(one, merged_linear.MergedLinearPart) for one in model.modules())


def test_engines_on_the_cpu_merge_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = tiny_head("glm4_moe")
    folder = write_model(tmp_path / "model", tiny, tiny.published())
    monkeypatch.setattr(merged_linear, "merge", lambda *_: pytest.fail("merged on a CPU"))
    assert answers(folder)[1] > 0


@pytest.mark.soak
@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "qwen3-mixed", "qwen3_5-4bit"])
def test_histories_are_the_same_with_merged_layers(name: str) -> None:
    tiny = World(name)
    parts = merged_linear.MergedLinearPart, merged_linear.MergedQuantizedLinearPart
    for module in (tiny.model, tiny.head):
        assert any(isinstance(one, parts[is_quantized_name(name)]) for one in module.modules())
    head = LoadedHead((tiny.head,), "random")
    tiny.runners = {
        "none": Runner(tiny.trunk),
        "whole": Runner(tiny.trunk, head),
        "reduced": Runner(tiny.trunk, head, compiles=True),
    }
    tally = Tally()
    for seed in range(900, 900 + in_test_or_soak(2 if is_quantized_name(name) else 3, 8)):
        tally.add(play(tiny, random_history(seed, tiny.vocab_size)))
    assert tally.tokens > 0
    assert tally.excused * 1000 <= tally.tokens
