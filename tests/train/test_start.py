"""Where training starts, and that a few steps help whatever the trunk's numbers are stored in."""

from __future__ import annotations

import random
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from outrider.cpu.extension import extension
from outrider.cpu.quantized import interleave_weights, keep_quantized
from outrider.models.dtypes import dequantize
from outrider.models.trunk import Trunk
from outrider.train import batches as batches_module
from outrider.train.batches import Batch, make_batch
from outrider.train.checkpoint import TrainState
from outrider.train.exchanges import Exchange
from outrider.train.loss import BatchLoss
from outrider.train.settings import TrainingSettings
from outrider.train.start import SCALES, _loss, _scaled, final_gain, starting_head
from outrider.train.trainer import Trainer
from tiny_models import tiny_model


def _exchanges(num: int) -> list[Exchange]:
    rng = random.Random(2)

    def ids(num: int) -> tuple[int, ...]:
        return tuple(rng.randrange(4, 90) for _ in range(num))

    return [Exchange(ids(5), ids(20), False, False) for _ in range(num)]


def _batch() -> Batch:
    return make_batch(_exchanges(6), depths=1)


def test_the_layer_is_the_trunks_last_one() -> None:
    model = tiny_model("qwen3")
    head = starting_head(Trunk(model, 64), _batch(), seed=0)
    np.testing.assert_array_equal(
        np.array(head.layers[0].mlp.up_proj.weight), np.array(model.layers[-1].mlp.up_proj.weight)
    )
    assert head.fc.weight[3, 3].item() == head.fc.weight[3, 64 + 3].item() == 0.5


def test_the_layer_of_a_quantised_trunk_is_taken_dequantised() -> None:
    model = tiny_model("llama")
    plain = np.array(model.layers[-1].self_attn.q_proj.weight)
    nn.quantize(model, group_size=32, bits=8)
    head = starting_head(Trunk(model, 64), _batch(), seed=0)
    copied = np.array(head.layers[0].self_attn.q_proj.weight)
    assert copied.dtype == np.float32
    np.testing.assert_allclose(copied, plain, atol=0.01)
    if extension() is not None:
        keep_quantized(model)
        interleave_weights(model)
        dequantize(model)
        np.testing.assert_array_equal(np.array(model.layers[-1].self_attn.q_proj.weight), copied)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])  # whose gain is the weight; one more than it
def test_the_hidden_norm_undoes_the_trunks_final_norm(family: str) -> None:
    model = tiny_model(family)
    trunk = Trunk(model, 64)
    weight = np.array(model.model.norm.weight)
    gain = weight if family == "llama" else 1 + weight
    np.testing.assert_allclose(np.array(final_gain(trunk)), gain, rtol=1e-4)
    head = starting_head(trunk, _batch(), seed=0)
    undone = np.array(head.pre_fc_norm_hidden.weight) * gain
    np.testing.assert_allclose(undone, undone[0], rtol=1e-3)


def test_the_scale_is_the_best_of_those_tried() -> None:
    trunk, batch = Trunk(tiny_model("llama"), 64), _batch()
    head = starting_head(trunk, batch, seed=0)
    hidden, gain = trunk.inner(batch.token_ids), final_gain(trunk)
    chosen = _loss(head, trunk, batch, hidden)
    assert chosen == min(_loss(_scaled(head, gain, scale), trunk, batch, hidden) for scale in SCALES)


def _losses(trunk: Trunk, folder: Path, num_steps: int = 6) -> list[BatchLoss]:
    exchanges = _exchanges(12)
    losses: list[BatchLoss] = []
    settings = TrainingSettings(steps=num_steps, batch_tokens=120, depths=2)
    head = starting_head(trunk, make_batch(exchanges, depths=1), seed=0)
    trainer = Trainer(
        trunk, exchanges, exchanges[:2], settings, folder, on_step=lambda _, loss: losses.append(loss)
    )
    trainer.run(TrainState(0, head.parameters(), {}))
    return losses


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llama", mx.float32), ("llama", mx.bfloat16), ("llama", mx.float16), ("qwen3_moe", mx.float32)],
)
def test_training_helps_in_every_dtype(tmp_path: Path, family: str, dtype: mx.Dtype) -> None:
    model = tiny_model(family, num_hidden_layers=2)
    model.set_dtype(dtype)
    losses = _losses(Trunk(model, 64), tmp_path)
    assert min(losses[-2:], key=lambda one: one.total).total < 0.9 * losses[0].total


def test_parts_of_a_batch_add_up_to_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _losses(Trunk(tiny_model("llama"), 64), tmp_path, num_steps=3)
    monkeypatch.setattr(batches_module, "MAX_TOKENS_PER_PASS", 60)
    parts = _losses(Trunk(tiny_model("llama"), 64), tmp_path, num_steps=3)
    for one, other in zip(whole, parts, strict=True):
        assert other.total == pytest.approx(one.total, rel=1e-3)
        assert other.divergence == pytest.approx(one.divergence, rel=0.05)  # weighted by part
