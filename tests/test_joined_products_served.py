"""An engine as on a GPU, on the CPU: its layers are joined, its tokens are those of an engine without."""

from __future__ import annotations

from pathlib import Path

import pytest

from models.head_checkpoints import QWENS, tiny_head
from outrider.cpu import fast_math, layers
from outrider.models import joined_products, machine
from outrider.models.heads import LoadedHead
from outrider.models.trunk import Trunk
from outrider.step.runner import Runner
from step.histories import Tally, World, play, random_history
from test_head_layouts_served import answers, write_model


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", "glm4_moe", "deepseek_v3"])
def test_joined_layers_change_no_token(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = tiny_head(family)
    head = tiny.converted() if family in QWENS else tiny.published()
    folder = write_model(tmp_path / "model", tiny, head)
    monkeypatch.setattr(fast_math, "applies", lambda: False)
    plain, _ = answers(folder)
    parts: list[tuple[Trunk, LoadedHead | None]] = []
    join = joined_products.join

    def seen(trunk: Trunk, head: LoadedHead | None = None) -> None:
        join(trunk, head)
        parts.append((trunk, head))

    monkeypatch.setattr(joined_products, "join", seen)
    monkeypatch.setattr(machine, "outruns_host", lambda: True)
    assert answers(folder)[0] == plain
    ((trunk, loaded),) = parts
    assert loaded is not None
    for model in (trunk.model, *loaded.layers):
        assert any(isinstance(one, joined_products.JoinedLinear) for one in model.modules())


def test_engines_on_the_cpu_have_their_own_products(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = tiny_head("glm4_moe")
    folder = write_model(tmp_path / "model", tiny, tiny.published())
    monkeypatch.setattr(joined_products, "join", lambda *parts: pytest.fail("joined on a CPU"))
    assert answers(folder)[1] > 0


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_histories_are_the_same_with_joined_layers(family: str) -> None:
    tiny = World(family)
    for part in (tiny.model, tiny.head):
        layers.restore(part)
    head = LoadedHead((tiny.head,), "random")
    joined_products.join(tiny.trunk, head)
    tiny.runners = {
        "none": Runner(tiny.trunk),
        "whole": Runner(tiny.trunk, head),
        "reduced": Runner(tiny.trunk, head, compiles=True),
    }
    tally = Tally()
    for seed in range(900, 908):
        tally.add(play(tiny, random_history(seed, tiny.vocab_size)))
    assert tally.tokens > 0
    assert tally.excused * 1000 <= tally.tokens
