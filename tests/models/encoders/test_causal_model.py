"""Causal embedding models: the trunk's states, whatever the chunks, and only where the files ask for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from test_encoder_model import run

from outrider.cpu import fast_math
from outrider.models.encoders.causal_model import CausalModel, PartSize, grouped
from outrider.models.encoders.loading import kind_in, load_pooling_model
from outrider.models.errors import ModelUnavailable
from outrider.plan import MANY_TOKENS
from outrider.pooling import TokenInput
from tiny_encoders import write_causal
from tiny_models import tiny_model, write_checkpoint

VOCAB = 100


def inputs_of(*lengths: int) -> list[TokenInput]:
    random = np.random.default_rng(sum(lengths))
    return [TokenInput(tuple(map(int, random.integers(0, VOCAB, length)))) for length in lengths]


def reference(family: str, given: TokenInput, mode: str) -> np.ndarray:
    """mlx-lm's own model over the whole input at once."""
    hidden = tiny_model(family).model(mx.array([given.ids]))[0]
    return np.array(hidden[-1] if mode == "lasttoken" else hidden.mean(axis=0))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> CausalModel:
    model = load_pooling_model(write_causal(tmp_path_factory.mktemp("causal") / "qwen3"), "qwen3")
    assert isinstance(model, CausalModel)
    return model


@pytest.mark.parametrize("mode", ["lasttoken", "mean"])
def test_vectors_are_the_states_of_the_model(tmp_path: Path, mode: str) -> None:
    model = load_pooling_model(write_causal(tmp_path / "model", pooling=mode), "qwen3")
    inputs = inputs_of(1, 30, 7, 29, 24)
    for given, vector in zip(inputs, run(model, inputs), strict=True):
        np.testing.assert_allclose(vector, reference("qwen3", given, mode), atol=2e-5)


def test_a_family_with_recurrent_layers(tmp_path: Path) -> None:
    model = load_pooling_model(write_causal(tmp_path / "model", "lfm2"), "lfm2")
    inputs = inputs_of(20, 18, 3)
    for given, vector in zip(inputs, run(model, inputs), strict=True):
        np.testing.assert_allclose(vector, reference("lfm2", given, "lasttoken"), atol=2e-5)


@pytest.mark.parametrize("part_tokens", [1, 5, 64])
def test_chunks_and_neighbours_change_nothing(qwen: CausalModel, part_tokens: int) -> None:
    inputs = inputs_of(40, 33, 12, 11, 39)
    alone = [run(qwen, [given])[0] for given in inputs]
    qwen._part.num_tokens = part_tokens
    qwen._part.most = part_tokens
    together = run(qwen, inputs)
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
        if fast_math.applies():
            assert one.tobytes() == other.tobytes()


def test_inputs_of_about_the_same_length_share_a_chunk() -> None:
    assert grouped(inputs_of(40, 33, 12, 11, 39, 2)) == [[0, 4, 1], [2, 3], [5]]


def test_parts_shrink_while_they_take_long_and_grow_while_they_are_quick() -> None:
    size = PartSize(512)
    for _ in range(9):
        size.took(size.num_tokens, 1.0)
    assert size.num_tokens == 16
    for _ in range(9):
        size.took(size.num_tokens, 0.001)
    assert size.num_tokens == 512
    size.took(3, 0.001)  # a short input says nothing about larger parts
    assert size.num_tokens == 512


def test_a_model_without_its_own_output_projection(tmp_path: Path) -> None:
    folder = write_causal(tmp_path / "model", tie_word_embeddings=False)
    assert not any(name.startswith("lm_head") for name in dict(mx.load(str(folder / "model.safetensors"))))
    (given,) = inputs_of(9)
    (vector,) = run(load_pooling_model(folder, "qwen3"), [given])
    np.testing.assert_allclose(vector, reference("qwen3", given, "lasttoken"), atol=2e-5)


def test_a_chat_model_is_no_embedding_model(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", "qwen3")
    assert kind_in(tmp_path / "model") is None
    with pytest.raises(ModelUnavailable, match=r"no modules\.json.*'qwen3' models generate text"):
        load_pooling_model(tmp_path / "model", "qwen3")


def test_a_pooling_that_a_causal_model_cannot_have_is_refused(tmp_path: Path) -> None:
    folder = write_causal(tmp_path / "model", pooling="cls")
    with pytest.raises(ModelUnavailable, match="'cls' of a causal model is not supported: lasttoken, mean"):
        load_pooling_model(folder, "qwen3")


def test_a_load_ends_where_its_caller_says_so(tmp_path: Path, monkeypatch: Any) -> None:
    class NotWanted(Exception):
        pass

    calls = []

    def check_wanted() -> None:
        calls.append(True)
        if len(calls) == 3:
            raise NotWanted

    folder = write_causal(tmp_path / "model")
    monkeypatch.setattr("outrider.models.loader.READ_BYTES", 1)
    with pytest.raises(NotWanted):
        load_pooling_model(folder, "qwen3", check_wanted=check_wanted)
    assert len(calls) == 3


def test_the_cells_of_an_input_fit_into_memory(tmp_path: Path, monkeypatch: Any) -> None:
    folder = write_causal(tmp_path / "model")
    monkeypatch.setattr("outrider.models.machine.free_bytes", lambda: 200_000)
    assert 1 <= load_pooling_model(folder, "qwen3").facts.max_tokens < 256
    beside_others = load_pooling_model(folder, "qwen3", cache_bytes=20_000).facts
    assert 1 <= beside_others.max_tokens == beside_others.pass_tokens < 20


@pytest.mark.parametrize(("num_bytes", "pass_tokens"), [(499, 4096), (501, MANY_TOKENS - 1)])
def test_no_weights_are_dequantised_where_they_do_not_fit(
    num_bytes: int, pass_tokens: int, tmp_path: Path, monkeypatch: Any
) -> None:
    folder = write_causal(tmp_path / "model")
    monkeypatch.setattr("outrider.models.machine.free_bytes", lambda: 1000)
    monkeypatch.setattr("outrider.models.encoders.causal_model._most_cells", lambda *_: 10_000)
    monkeypatch.setattr("outrider.models.encoders.causal_model.CPU_PASS_TOKENS", 4096)
    monkeypatch.setattr("outrider.models.encoders.causal_model.copied_bytes", lambda _: num_bytes)
    assert load_pooling_model(folder, "qwen3").facts.pass_tokens == pass_tokens
