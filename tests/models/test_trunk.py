"""The trunk over ragged caches, and controls: each mechanism, once broken, must show in the logits."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from outrider.cache.placement import Placement
from outrider.cache.ragged_kv import KVSpec
from outrider.models.families import UnsupportedModel
from outrider.models.trunk import Trunk, TrunkCache
from ragged_rows import RaggedRows, error, solo_logits
from tiny_models import VOCAB_SIZE, WINDOW, tiny_model

TEXT_A = [(7 * i * i + 3 * i + 5) % VOCAB_SIZE for i in range(40)]
TEXT_B = [(5 * i * i + 11 * i + 2) % VOCAB_SIZE for i in range(40)]
FAMILIES = [
    "llama",
    "gemma3_text",
    "deepseek_v3",
    "deepseek_v32",
    "gpt2",
]  # rope, windows, latent, top-k, learned


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> nn.Module:
    return tiny_model(request.param)


def _two_rows(model: nn.Module) -> RaggedRows:
    """Row a with 21 cells in slot 2 and row b with 6 in slot 0, after uneven rollbacks; slot 1 is free."""
    rows = RaggedRows(Trunk(model, max_context=256), num_slots=3, capacity=32)
    rows.scribble()
    rows.join("a", slot=2)
    rows.join("b", slot=0)
    rows.feed({"a": TEXT_A[:20], "b": TEXT_B[:7]})
    rows.roll_back("b", 2)
    rows.feed({"a": [*TEXT_A[20:21], 9, 9, 9], "b": [*TEXT_B[5:6], 9]})
    rows.roll_back("a", 3)
    rows.roll_back("b", 1)
    return rows


def _step(rows: RaggedRows) -> dict[str, np.ndarray]:
    return rows.feed({"a": TEXT_A[21:24], "b": TEXT_B[6:8]})


def _errors(model: nn.Module, logits: dict[str, np.ndarray]) -> tuple[float, float]:
    """How far rows a and b are from running alone."""
    return (
        error(logits["a"], solo_logits(model, TEXT_A[:24])[21:]),
        error(logits["b"], solo_logits(model, TEXT_B[:8])[6:]),
    )


def test_a_ragged_step_equals_solo_runs(model: nn.Module) -> None:
    assert max(_errors(model, _step(_two_rows(model)))) <= 1e-5


def test_cells_that_are_not_masked_show(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = _two_rows(model)

    def everything(self: Placement, window: int | None) -> mx.array:
        return mx.ones((len(self.slots), 1, self.cells.shape[1], self.num_attended), mx.bool_)

    monkeypatch.setattr(Placement, "mask", everything)
    assert min(_errors(model, _step(rows))) > 1e-2


def test_a_mask_that_is_off_by_one_shows(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = _two_rows(model)
    mask = Placement.mask

    def late(self: Placement, window: int | None) -> mx.array:
        return mx.roll(mask(self, window), 1, axis=-1)

    monkeypatch.setattr(Placement, "mask", late)
    assert min(_errors(model, _step(rows))) > 1e-3


def test_one_position_for_all_rows_makes_the_short_row_drift(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = _two_rows(model)
    init = Placement.__init__

    def with_the_longest_start(self: Placement, *args: object, **named: object) -> None:
        init(self, *args, **named)  # type: ignore[arg-type]
        self.positions = mx.broadcast_to(self.starts.max(), self.starts.shape)

    monkeypatch.setattr(Placement, "__init__", with_the_longest_start)
    longest, shortest = _errors(model, _step(rows))
    assert longest <= 1e-5
    assert shortest > 1e-3


@pytest.mark.parametrize("row", ["a", "b"])
def test_a_rollback_of_one_too_many_shows_in_its_own_row_only(model: nn.Module, row: str) -> None:
    rows = _two_rows(model)
    rows.roll_back(row, 1)
    wrong, right = _errors(model, _step(rows))
    if row == "b":
        wrong, right = right, wrong
    assert wrong > 1e-2
    assert right <= 1e-5


def test_junk_in_cells_that_no_row_owns_changes_nothing(model: nn.Module) -> None:
    clean, scribbled = _two_rows(model), _two_rows(model)
    for kv in scribbled.cache.buffers():
        for array in (kv.keys, kv.values):
            array[1] = 1e3
            array[2, :, 21:] = -1e3
            array[0, :, 6:] = 1e3
    want, got = _step(clean), _step(scribbled)
    for row in "ab":
        assert error(got[row], want[row]) <= 1e-6


def test_a_step_writes_the_fed_cells_and_no_others(model: nn.Module) -> None:
    rows = _two_rows(model)
    before = [np.array(array) for kv in rows.cache.buffers() for array in (kv.keys, kv.values)]
    _step(rows)
    after = [np.array(array) for kv in rows.cache.buffers() for array in (kv.keys, kv.values)]
    written = np.zeros((3, rows.capacity), bool)
    written[2, 21:24] = written[0, 6:8] = True
    for old, new in zip(before, after, strict=True):
        changed = np.any(old != new, axis=(1, 3))[:, :-1]  # the last cell takes the padding
        np.testing.assert_array_equal(changed, written)


def test_hidden_states_are_those_after_the_final_norm(model: nn.Module) -> None:
    trunk = Trunk(model, max_context=256)
    inner = trunk.inner(mx.array([TEXT_A[:6]]))
    assert trunk.logits(inner).shape == (1, 6, VOCAB_SIZE)
    assert error(np.array(trunk.logits(inner)[0]), solo_logits(model, TEXT_A[:6])) <= 1e-6


@pytest.mark.parametrize("family", ["cohere", "granite", "minicpm", "gemma4_text", "muse_glimmer", "minimax"])
def test_logits_go_through_the_models_own_scales_and_caps(family: str) -> None:
    model = tiny_model(family)
    trunk = Trunk(model, max_context=256)
    got = trunk.logits(trunk.inner(mx.array([TEXT_A[:6]])))[0]
    assert error(np.array(got), solo_logits(model, TEXT_A[:6])) <= 1e-6


def test_the_trunk_shares_the_models_weights() -> None:
    model = tiny_model("llama")
    trunk = Trunk(model, max_context=256)
    model.lm_head.weight = mx.zeros_like(model.lm_head.weight)
    hidden = mx.ones((1, 1, trunk.hidden_size))
    assert mx.all(trunk.logits(hidden) == 0)


def test_what_a_trunk_knows_of_its_model() -> None:
    trunk = Trunk(tiny_model("qwen3"), max_context=77)
    assert (trunk.hidden_size, trunk.vocab_size, trunk.max_context) == (64, VOCAB_SIZE, 77)
    assert trunk.dtype == mx.float32
    assert trunk.embed(mx.array([[1, 2]])).shape == (1, 2, 64)
    assert trunk.layout == [KVSpec(2, 16, 16, mx.float32)] * 3
    assert trunk.num_bytes > VOCAB_SIZE * 64 * 4


def test_a_layout_names_windows_pairs_and_shared_layers() -> None:
    windows = [spec.window for spec in Trunk(tiny_model("gpt_oss"), 64).layout if isinstance(spec, KVSpec)]
    assert windows == [WINDOW, None, WINDOW]
    pairs = Trunk(tiny_model("longcat_flash"), 64).layout
    assert [len(spec) for spec in pairs if isinstance(spec, tuple)] == [2, 2]
    assert len(Trunk(tiny_model("gemma4_text"), 64).layout) == 3  # of five layers; two use others' cells
    narrow_values = Trunk(tiny_model("mimo_v2_flash"), 64).layout[0]
    assert isinstance(narrow_values, KVSpec)
    assert (narrow_values.key_dim, narrow_values.value_dim) == (16, 8)


def test_the_layout_takes_the_models_dtype() -> None:
    model = tiny_model("llama")
    model.set_dtype(mx.bfloat16)
    trunk = Trunk(model, max_context=64)
    assert trunk.dtype == mx.bfloat16
    assert {kv.spec.dtype for kv in TrunkCache(trunk.layout).buffers()} == {mx.bfloat16}
    assert trunk.logits(mx.zeros((1, 1, 64), mx.bfloat16)).dtype == mx.float32


def test_a_model_without_token_embeddings_is_refused() -> None:
    class Bare(nn.Module):
        layers = ()

    with pytest.raises(UnsupportedModel, match="no inner stack with token embeddings"):
        Trunk(Bare(), max_context=64)
