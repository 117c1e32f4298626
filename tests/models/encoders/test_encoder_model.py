"""Encoders equal their formula in NumPy, and an input's vector does not depend on its neighbours."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from encoder_reference import pooled, score, states
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.cpu import fast_math
from outrider.models.encoders.encoder_model import EncoderModel
from outrider.models.encoders.loading import load_pooling_model
from outrider.models.encoders.network import gelu
from outrider.pooling import TokenInput
from tiny_encoders import (
    CONFIGS,
    HEADS,
    NUM_LAYERS,
    POSITIONS,
    VOCAB_SIZE,
    encoder_weights,
    layer_names,
    write_encoder,
)

MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")


def run(model: Any, inputs: list[TokenInput]) -> list[np.ndarray]:
    parts = model.run(inputs)
    while True:
        try:
            next(parts)
        except StopIteration as end:
            return end.value


def random_inputs(random: np.random.Generator, num: int, most: int = POSITIONS - 2) -> list[TokenInput]:
    lengths = random.integers(1, most + 1, num)
    return [TokenInput(tuple(map(int, random.integers(0, VOCAB_SIZE, length)))) for length in lengths]


def reference(family: str, given: TokenInput, seed: int = 0) -> np.ndarray:
    names = [layer_names(family, n) for n in range(NUM_LAYERS)]
    return states(encoder_weights(family, seed), names, CONFIGS[family], given.ids)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> EncoderModel:
    model = load_pooling_model(write_encoder(tmp_path_factory.mktemp("encoders") / "bert"), "bert")
    assert isinstance(model, EncoderModel)
    return model


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_a_family_equals_its_formula(tmp_path: Path, family: str) -> None:
    model = load_pooling_model(write_encoder(tmp_path / "model", family), family)
    inputs = random_inputs(np.random.default_rng(1), 7)
    for given_, vector in zip(inputs, run(model, inputs), strict=True):
        np.testing.assert_allclose(vector, pooled(reference(family, given_), "mean"), atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_a_pooling_mode_equals_its_formula(bert: EncoderModel, mode: str) -> None:
    model = replace(bert, spec=replace(bert.spec, mode=mode))
    inputs = random_inputs(np.random.default_rng(2), 5)
    for given_, vector in zip(inputs, run(model, inputs), strict=True):
        np.testing.assert_allclose(vector, pooled(reference("bert", given_), mode), atol=1e-5)


@pytest.mark.parametrize("family", sorted(HEADS))
def test_a_reranker_equals_its_formula(tmp_path: Path, family: str) -> None:
    model = load_pooling_model(write_encoder(tmp_path / "model", family, is_reranker=True), family)
    prefix = {"xlm-roberta": "roberta"}.get(family, family) + "."
    weights = encoder_weights(family, is_reranker=True)
    body = {name.removeprefix(prefix): array for name, array in weights.items()}
    names = [layer_names(family, n) for n in range(NUM_LAYERS)]
    activation = np.tanh if family != "distilbert" else lambda x: np.maximum(x, 0)
    types = (0, 0, 0, 1, 1) if family == "bert" else ()
    given_ = TokenInput((2, 9, 3, 20, 3), types)
    (vector,) = run(model, [given_])
    first = states(body, names, CONFIGS[family], given_.ids, types)[0]
    assert vector == pytest.approx([score(weights, HEADS[family], activation, first)], abs=1e-5)


def test_gelu_equals_its_formula() -> None:
    x = np.concatenate([np.linspace(-12, 12, 4001), [0.0, -0.0, 1e-30, -1e-30, 1e4, -1e4]]).astype(np.float32)
    exact = [0.5 * each * (1 + math.erf(each / math.sqrt(2))) for each in map(float, x)]
    np.testing.assert_allclose(np.array(gelu(mx.array(x))), exact, atol=5e-7, rtol=3e-7)


@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1), st.integers(1, 12))
def test_neighbours_change_nothing(bert: EncoderModel, seed: int, num: int) -> None:
    """To the bit on x86, where matmuls of up to 512 tokens are the same in every pass; elsewhere to 1e-6."""
    inputs = random_inputs(np.random.default_rng(seed), num)
    together = run(bert, inputs)
    alone = [run(bert, [given_])[0] for given_ in inputs]
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
        if fast_math.applies():
            assert one.tobytes() == other.tobytes()


def test_a_long_input_is_computed_in_more_and_smaller_parts(bert: EncoderModel) -> None:
    given_ = random_inputs(np.random.default_rng(3), 1)[0]
    small = replace(bert, facts=replace(bert.facts, pass_tokens=4))
    num_parts = sum(1 for _ in small.run([given_]))
    assert num_parts == NUM_LAYERS * 2 * -(-len(given_) // 4)
    np.testing.assert_allclose(run(small, [given_])[0], run(bert, [given_])[0], atol=1e-6)


def test_a_pass_is_computed_layer_by_layer(bert: EncoderModel) -> None:
    assert sum(1 for _ in bert.run(random_inputs(np.random.default_rng(4), 3))) == NUM_LAYERS


def test_facts_of_a_model(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "model", "roberta", pooling="cls", normalises=False)
    facts = load_pooling_model(folder, "roberta").facts
    assert (facts.kind, facts.dimensions, facts.vocab_size) == ("embedding", 32, VOCAB_SIZE)
    assert (facts.pooling, facts.is_normalised) == ("cls", False)
    assert facts.max_tokens == POSITIONS - 2  # positions start behind the padding id


@pytest.mark.parametrize(("in_file", "by_operator", "limit"), [(9, None, 9), (None, 7, 7), (9, 20, 9)])
def test_the_length_of_an_input_is_limited_by_files_and_operator(
    tmp_path: Path, in_file: int | None, by_operator: int | None, limit: int
) -> None:
    folder = write_encoder(tmp_path / "model", max_seq_length=in_file)
    assert load_pooling_model(folder, "bert", max_tokens=by_operator).facts.max_tokens == limit


def test_names_of_older_checkpoints_are_read(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "model")
    file = str(folder / "model.safetensors")
    weights: Any = mx.load(file)
    mx.eval(weights)
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    renamed = {f"bert.{_replaced(name, old)}": array for name, array in weights.items()}
    mx.save_safetensors(file, renamed)
    given_ = random_inputs(np.random.default_rng(5), 1)[0]
    (vector,) = run(load_pooling_model(folder, "bert"), [given_])
    np.testing.assert_allclose(vector, pooled(reference("bert", given_), "mean"), atol=1e-5)


def _replaced(name: str, endings: dict[str, str]) -> str:
    ending = next((ending for ending in endings if name.endswith(ending)), "")
    return name.removesuffix(ending) + endings.get(ending, "")
