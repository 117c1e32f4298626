"""Layers that get the CPU's arithmetic: only where it applies, only this model's, and back again."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import activations, base, llama

from outrider.cpu import fast_math
from outrider.cpu.layers import use_fast_math
from outrider.models.layer_swaps import swap_layers, without_speed_swaps
from outrider.models.trunk import Trunk
from ragged_rows import RaggedRows, error, solo_logits
from tiny_models import VOCAB_SIZE, tiny_model

pytestmark = pytest.mark.skipif(not fast_math.applies(), reason="for Linux on x86 without a GPU")

TEXT = [(7 * i * i + 3 * i + 5) % VOCAB_SIZE for i in range(40)]
FAMILIES = ["llama", "qwen3", "gemma3_text", "deepseek_v3", "glm4_moe", "gpt_oss", "qwen3_5", "nemotron_h"]


def kinds(model: nn.Module) -> list[type]:
    return [type(module) for _, module in model.named_modules()]


def ragged_logits(model: nn.Module) -> np.ndarray:
    rows = RaggedRows(Trunk(model, max_context=256), num_slots=2, capacity=64)
    rows.scribble()
    rows.join("a", slot=0)
    rows.join("b", slot=1)
    first = rows.feed({"a": TEXT[:20], "b": TEXT[5:9]})["a"]
    second = rows.feed({"a": TEXT[20:24], "b": TEXT[9:10]})["a"]
    return np.concatenate([first, second])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_gives_what_it_gave(family: str) -> None:
    model = tiny_model(family)
    expected = solo_logits(model, TEXT[:24])
    use_fast_math(model)
    assert error(ragged_logits(model), expected) <= 1e-5
    assert error(solo_logits(model, TEXT[:24]), expected) <= 1e-5  # with mlx-lm's own caches


def test_attention_mlp_and_rope_of_a_llama_are_ours() -> None:
    model = tiny_model("llama", rope_scaling=None)
    use_fast_math(model)
    layer = model.layers[0]
    assert type(layer.self_attn.rope) is fast_math.SharedAnglesRope
    ours = type(layer.self_attn).__call__.__globals__, type(layer.mlp).__call__.__globals__
    assert ours[0]["scaled_dot_product_attention"] is fast_math.attention
    assert ours[1]["swiglu"] is fast_math.swiglu
    assert isinstance(layer.self_attn, llama.Attention)
    assert type(layer.mlp).__module__ == "mlx_lm.models.llama"
    assert type(layer.mlp).__name__ == "MLP"


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_mlx_lms_modules_and_other_models_stay_as_they_are(family: str) -> None:
    before = tiny_model(family)
    untouched = kinds(before)
    used = tiny_model(family)
    use_fast_math(used)
    assert kinds(before) == untouched == kinds(tiny_model(family)) != kinds(used)
    assert llama.swiglu is activations.swiglu
    assert llama.scaled_dot_product_attention is base.scaled_dot_product_attention
    assert llama.MLP.__call__.__globals__ is vars(llama)


def test_used_twice_is_used_once() -> None:
    model = tiny_model("qwen3_moe")
    before = kinds(model)
    use_fast_math(model)
    once = kinds(model)
    use_fast_math(model)
    assert kinds(model) == once != before


def test_without_speed_swaps_leaves_each_model_as_it_found_it() -> None:
    used, plain = tiny_model("qwen3_moe"), tiny_model("qwen3_moe")
    use_fast_math(used)
    ours, theirs = kinds(used), kinds(plain)
    with without_speed_swaps(used, plain):
        assert kinds(used) == kinds(plain) == theirs
    assert (kinds(used), kinds(plain)) == (ours, theirs)


@pytest.mark.parametrize("is_served", [True, False])
def test_only_served_models_are_swapped(is_served: bool) -> None:
    model = tiny_model("llama")
    before = kinds(model)
    swap_layers(model, dry_run=(lambda: None) if is_served else None)
    assert (kinds(model) != before) == is_served


def test_nothing_happens_on_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    assert not fast_math.applies()


@pytest.mark.parametrize(("system", "machine"), [("darwin", "arm64"), ("linux", "aarch64")])
def test_nothing_happens_on_another_machine(
    system: str, machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert not fast_math.applies()
