"""Rows with different adapters, and with none, in one pass: what each of them gives alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from adapter_files import linear_keys, save_adapter, write_adapter
from outrider.models import merged_linear
from outrider.models.adapters.files import AdapterError, read_adapter
from outrider.models.adapters.terms import StackedTerms
from outrider.models.dtypes import settle_dtype
from outrider.models.trunk import Trunk
from ragged_rows import RaggedRows, error, solo_logits
from tiny_models import VOCAB_SIZE, is_quantized_name, quantized_tiny_model, tiny_model

TEXT = [(5 * i * i + 3 * i + 7) % VOCAB_SIZE for i in range(60)]
FLOAT = ("llama", "qwen2", "phi3", "gemma3_text", "qwen3_5", "deepseek_v3")
QUANTIZED = ("llama-4bit", "qwen2-8bit", "qwen3_moe-4bit", "qwen3_5-4bit")
ADAPTERS: dict[str, dict[str, Any]] = {  # every second one is a DoRA
    "first": {"rank": 4, "seed": "a"},
    "second": {"rank": 3, "seed": "b", "kind": "dora"},
    "third": {"rank": 17, "seed": "c", "num_layers": 1, "scale": 0.5},
}


@pytest.fixture(autouse=True, scope="module")
def not_compiled() -> None:
    """As on CPUs: MLX would start a compiler for each small function of mlx-lm's models."""
    mx.disable_compile()


def text_of(row: int) -> list[int]:
    return TEXT[row : row + 12 + 7 * row]


def new_model(name: str) -> nn.Module:
    if not is_quantized_name(name):
        return tiny_model(name)
    model, _ = quantized_tiny_model(name)
    return model


def served(name: str) -> Trunk:
    model = new_model(name)
    settle_dtype(model, "auto")
    trunk = Trunk(model, max_context=256)
    trunk.prepare_for_serving()
    trunk.adapters.allow(4, 1 << 30)
    return trunk


class Adapted:
    """A trunk with adapters, and mlx-lm's own model with each of them."""

    def __init__(self, name: str, folder: Path, *adapters: str) -> None:
        self.trunk = served(name)
        self.models: dict[str, nn.Module] = {}
        for adapter in adapters or ADAPTERS:
            self.models[adapter] = model = new_model(name)
            path = write_adapter(folder / adapter, model, **ADAPTERS[adapter])
            self.trunk.adapters.load(adapter, read_adapter(path))

    def fed(self, *adapters: str | None) -> list[np.ndarray]:
        """The logits of rows with these adapters: each is fed a prompt, and then some tokens more."""
        rows = RaggedRows(self.trunk, 4, 64)
        rows.scribble()
        for i, adapter in enumerate(adapters):
            loaded = self.trunk.adapters.loaded
            rows.join(str(i), 3 - i, 0 if adapter is None else loaded[adapter].id)
        texts = {str(i): text_of(i) for i in range(len(adapters))}
        first = rows.feed({row: text[:-3] for row, text in texts.items()})
        second = rows.feed({row: text[-3:] for row, text in texts.items() if row != "1"})
        return [np.concatenate([first[row], second.get(row, first[row][:0])]) for row in first]

    def expected(self, place: int, adapter: str) -> np.ndarray:
        return solo_logits(self.models[adapter], text_of(place))


@pytest.mark.parametrize("name", FLOAT)
def test_rows_of_a_pass_give_what_mlx_lm_gives_with_their_adapters(name: str, tmp_path: Path) -> None:
    adapted = Adapted(name, tmp_path)
    plain = adapted.fed(None, None, None, None)
    first, none, second, third = adapted.fed("first", None, "second", "third")
    assert np.array_equal(none, plain[1])
    for place, adapter, found in ((0, "first", first), (2, "second", second), (3, "third", third)):
        assert error(found, adapted.expected(place, adapter)) < 1e-5
        assert error(found, plain[place]) > 0.01, "an adapter that changes nothing would pass too"


@pytest.mark.parametrize("name", QUANTIZED)
def test_rows_of_a_quantised_model_give_the_same_to_the_bit_alone(name: str, tmp_path: Path) -> None:
    adapted = Adapted(name, tmp_path)
    plain = adapted.fed(None, None, None, None)
    mixed = adapted.fed("first", None, "second", "third")
    alike = adapted.fed("first", "first", "second", None)
    assert np.array_equal(mixed[1], plain[1])
    assert np.array_equal(alike[3], plain[3])
    assert np.array_equal(alike[0], mixed[0])
    assert np.array_equal(alike[2], mixed[2])
    for place, adapter in ((0, "first"), (2, "second"), (3, "third")):
        # mlx-lm does not round tokens to 15 bits, as these layers do
        assert error(mixed[place], adapted.expected(place, adapter)) < 0.01
        assert error(mixed[place], plain[place]) > 0.05


def test_parts_of_merged_layers_have_adapters_of_their_own(tmp_path: Path) -> None:
    """On GPUs q, k and v are one matmul."""
    adapted = Adapted("llama", tmp_path)
    others = served("llama")
    merged_linear.merge(others.model, others.dry_run)
    others.adapters.allow(4, 1 << 30)
    kinds = {type(layer) for _, layer in others.model.named_modules()}
    assert merged_linear.MergedLinearPart in kinds
    for name in ADAPTERS:
        others.adapters.load(name, read_adapter(tmp_path / name))
    expected = adapted.fed("first", None, "second", "third")
    adapted.trunk = others
    for found, wanted in zip(adapted.fed("first", None, "second", "third"), expected, strict=True):
        assert error(found, wanted) < 1e-5


def test_an_unloaded_adapter_leaves_nothing_behind(tmp_path: Path) -> None:
    adapted = Adapted("llama", tmp_path)
    adapters = adapted.trunk.adapters
    before = adapted.fed(None, "second", None, None)
    bytes_of_all = adapters.num_bytes
    adapters.unload("first")
    assert 0 < adapters.num_bytes < bytes_of_all
    assert np.array_equal(adapted.fed(None, "second", None, None)[1], before[1])
    again = adapters.load("again", read_adapter(tmp_path / "third"))
    assert again.id == 1, "the id is free again"
    assert error(adapted.fed("again", None, None, None)[0], adapted.fed("third", None, None, None)[0]) < 1e-6
    for name in ("again", "second", "third"):
        adapters.unload(name)
    assert adapters.num_bytes == 0
    assert np.array_equal(adapted.fed(None)[0], Adapted("llama", tmp_path / "new").fed(None)[0])


def test_stacked_arrays_have_few_shapes(tmp_path: Path) -> None:
    """A traced pass takes them as inputs: it is not traced again for one more adapter of a similar rank."""
    adapted = Adapted("llama", tmp_path, "first")
    shapes = adapted.trunk.adapters.traced.shapes
    adapted.trunk.adapters.load("other", read_adapter(tmp_path / "first"))
    assert adapted.trunk.adapters.traced.shapes == shapes
    terms = adapted.trunk.adapters.of_pass(mx.array([0, 2]))
    assert terms is not None
    assert all(isinstance(own, StackedTerms) for own in terms.terms.values())


# What is refused --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama() -> Trunk:
    return served("llama")


def refused(trunk: Trunk, folder: Path) -> str:
    before = trunk.adapters.loaded, trunk.adapters.num_bytes
    with pytest.raises(AdapterError) as caught:
        trunk.adapters.load("bad", read_adapter(folder))
    assert (trunk.adapters.loaded, trunk.adapters.num_bytes) == before
    return str(caught.value)


def test_an_adapter_of_a_larger_model_is_refused(llama: Trunk, tmp_path: Path) -> None:
    wide = tiny_model("llama", hidden_size=128)
    assert "another base model" in refused(llama, write_adapter(tmp_path / "wide", wide))
    deep = tiny_model("llama", num_hidden_layers=5)
    message = refused(llama, write_adapter(tmp_path / "deep", deep, keys=["self_attn.q_proj"]))
    assert "model.layers.3.self_attn.q_proj" in message or "model.layers.4.self_attn.q_proj" in message


def test_embeddings_the_output_and_experts_are_refused_by_name(llama: Trunk, tmp_path: Path) -> None:
    for key in ("lm_head", "model.embed_tokens"):
        folder = write_adapter(tmp_path / key, tiny_model("llama"), keys=[key])
        assert key in (message := refused(llama, folder))
        assert "--adapter" in message
    moe = served("qwen3_moe")
    folder = write_adapter(tmp_path / "moe", tiny_model("qwen3_moe"), keys=["mlp.switch_mlp.up_proj"])
    assert "experts" in refused(moe, folder)


def test_numbers_that_are_not_finite_are_refused(llama: Trunk, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, tiny_model("llama"), keys=["self_attn.q_proj"])
    arrays = dict(mx.load(str(folder / "adapters.safetensors")))
    name = next(iter(arrays))
    arrays[name][0, 0] = mx.nan
    mx.eval(arrays)
    config = {"fine_tune_type": "lora", "lora_parameters": {"rank": 4, "scale": 1.0}}
    save_adapter(folder, config, arrays)
    assert "NaN" in refused(llama, folder)


def test_names_counts_and_bytes_are_bounded(tmp_path: Path) -> None:
    trunk = served("llama")
    files = read_adapter(write_adapter(tmp_path, tiny_model("llama")))
    for name in ("", "a:b", "../a", "a b", "x" * 65, "-a"):
        with pytest.raises(AdapterError, match="name"):
            trunk.adapters.load(name, files)
    trunk.adapters.allow(1, 1 << 30)
    trunk.adapters.load("one", files)
    with pytest.raises(AdapterError, match="--max-adapters"):
        trunk.adapters.load("two", files)
    trunk.adapters.unload("one")
    trunk.adapters.allow(2, 1000)
    with pytest.raises(AdapterError, match="--adapter-memory"):
        trunk.adapters.load("one", files)
    assert trunk.adapters.num_bytes == 0
    assert linear_keys(trunk.model)
