"""Latent attention in one form: a token's result is the same to the bit in passes of any width."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.mla import MultiLinear

from outrider.cpu import fast_math
from outrider.cpu.latent_attention import Cells, LatentLinear, LatentQuantizedLinear
from outrider.cpu.quantized import CpuQuantizedMultiLinear, is_kept, quantized_layers
from outrider.models.dtypes import settle_dtype
from outrider.models.layer_swaps import without_speed_swaps
from outrider.models.trunk import Trunk
from ragged_rows import RaggedRows, error, solo_logits
from tiny_models import VOCAB_SIZE, quantized_tiny_model, tiny_model

TEXT = [(7 * i * i + 3 * i + 5) % VOCAB_SIZE for i in range(40)]
FAMILIES = ("bailing_moe_v3", "deepseek_v3", "glm4_moe_lite", "kimi_linear", "longcat_flash")
pytestmark = pytest.mark.skipif(not fast_math.applies(), reason="for Linux on x86")


def served(name: str) -> Trunk:
    if "-" in name:
        model, _ = quantized_tiny_model(name)
        settle_dtype(model, "auto")
    else:
        model = tiny_model(name)
    trunk = Trunk(model, max_context=256)
    trunk.prepare_for_serving()
    return trunk


def fed(trunk: Trunk, widths: Sequence[int]) -> np.ndarray:
    """The logits of a text that is fed in passes of these widths."""
    rows = RaggedRows(trunk, num_slots=1, capacity=64)
    rows.join("a", slot=0)
    found, start = [], 0
    for width in widths:
        found.append(rows.feed({"a": TEXT[start : start + width]})["a"])
        start += width
    return np.concatenate(found)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_both_forms_of_mlx_lm(family: str) -> None:
    trunk = served(family)
    expected = solo_logits(tiny_model(family), TEXT)
    assert LatentLinear in kinds_of(trunk)
    for widths in ([40], [1] * 40, [7, 1, 3, 1, 1, 16, 2, 9]):
        assert error(fed(trunk, widths), expected) < 1e-4
    with without_speed_swaps(trunk.model):
        assert not kinds_of(trunk) & {LatentLinear, LatentQuantizedLinear}
        assert np.array_equal(solo_logits(trunk.model, TEXT), expected)


@pytest.mark.parametrize("name", ["deepseek_v3-4bit", "glm4_moe_lite-nvfp4", "longcat_flash-8bit"])
def test_with_quantised_weights_no_bit_depends_on_the_width_of_passes(name: str) -> None:
    trunk = served(name)
    if not any(quantized_layers(trunk.model)):
        pytest.skip("no native extension")
    assert LatentQuantizedLinear in kinds_of(trunk)
    whole = fed(trunk, [40])
    assert np.array_equal(fed(trunk, [1] * 40), whole)
    assert np.array_equal(fed(trunk, [7, 1, 3, 1, 1, 16, 2, 9]), whole)


def test_long_rows_do_not_depend_on_it_either() -> None:
    trunk = served("deepseek_v3-4bit")
    text = TEXT * 15
    rows = RaggedRows(trunk, num_slots=2, capacity=640)
    rows.join("whole", slot=0)
    rows.join("parts", slot=1)
    whole = np.concatenate(
        [rows.feed({"whole": text[:512]})["whole"], rows.feed({"whole": text[512:]})["whole"]]
    )
    found, start = [], 0
    for width in (300, 1, 7, 130, 1, 2, 150, 9):
        found.append(rows.feed({"parts": text[start : start + width]})["parts"])
        start += width
    assert start == len(text) == 600
    assert np.array_equal(np.concatenate(found), whole)


def kinds_of(trunk: Trunk) -> set[type]:
    return {type(module) for _, module in trunk.model.named_modules()}


def test_quantised_projections_stay_quantised() -> None:
    model = served("deepseek_v3-4bit").model
    if not any(quantized_layers(model)):
        pytest.skip("no native extension")
    projections = [layer.self_attn[part] for layer in model.layers for part in ("embed_q", "unembed_out")]
    assert {type(projection) for projection in projections} == {LatentQuantizedLinear}
    assert all(map(is_kept, projections))
    assert issubclass(LatentQuantizedLinear, CpuQuantizedMultiLinear)


def test_keys_and_values_of_cells_are_not_computed() -> None:
    layer = MultiLinear(32, 16, num_heads=4)
    layer.__class__ = LatentLinear
    latents = mx.zeros((2, 1, 9, 16))
    assert layer(latents, transpose=False) == Cells(layer, latents)
    values = mx.zeros((2, 1, 9, 32))
    assert layer(values) == Cells(layer, values)
    assert layer(mx.zeros((2, 4, 1, 32))).shape == (2, 4, 1, 16)


@pytest.mark.parametrize("family", ["mistral4", "deepseek_v32"])
def test_other_forms_of_latent_attention_are_computed_as_before(family: str) -> None:
    trunk = served(family)
    assert error(fed(trunk, [7, 1, 3, 1, 1, 16, 2, 9]), solo_logits(tiny_model(family), TEXT)) < 1e-4
