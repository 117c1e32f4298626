"""The head of every family, as published and as converted: its logits are those of the published formula."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from models.head_checkpoints import FAMILIES, QWENS, TinyHead, final_norm, projection, tiny_head, wide, write
from models.head_reference import head_pass
from outrider.cache.placement import Placement
from outrider.cache.ragged_kv import KVSpec
from outrider.models.heads import LoadedHead, MTPHead, head_layout, load_head, locate_file
from outrider.models.trunk import Trunk, TrunkCache
from ragged_rows import error

Array = np.ndarray
WIDTH = 5  # and one deeper: as many as an indexed attention of the tiny models sees
FORMS = ["published", "converted"]


def loaded(tiny: TinyHead, form: str, folder: Path) -> LoadedHead:
    tensors = tiny.published() if form == "published" else tiny.converted()
    file = write(folder / "mtp.safetensors", tensors, {"format": "pt" if form == "published" else "mlx"})
    return load_head(file, tiny.trunk, config=tiny.config)


class Cells:
    """The head's cells of one row, fed by hand."""

    def __init__(self, module: MTPHead, trunk: Trunk) -> None:
        self._module = module
        self._cache = TrunkCache([head_layout(module, trunk)])
        for buffers in self._cache.buffers():
            buffers.resize(2, 32)

    def feed(self, hidden: Any, embedded: Any, start: int) -> mx.array:
        """[cells, H] each -> the outputs [cells, H]"""
        hidden, embedded = (mx.array(x).astype(mx.float32)[None] for x in (hidden, embedded))
        width = hidden.shape[1]
        place = Placement([1], mx.array([start]), mx.array([width]), width, start + width, 32)
        out, fed_back = self._module(hidden, embedded, self._cache.views(place)[0])
        assert mx.array_equal(out, fed_back)
        return out[0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_at_both_depths_are_those_of_the_published_formula(
    tmp_path: Path, family: str, form: str
) -> None:
    tiny = tiny_head(family)
    (module,) = loaded(tiny, form, tmp_path).layers
    rng = np.random.default_rng(3)
    hidden, embedded = rng.standard_normal((WIDTH, 64)), rng.standard_normal((WIDTH + 1, 64))
    cells = Cells(module, tiny.trunk)
    first = cells.feed(hidden[:4], embedded[:4], 0)
    rest = cells.feed(hidden[4:], embedded[4:WIDTH], 4)
    deeper = cells.feed(rest[-1:], embedded[WIDTH:], WIDTH)

    weights, last = wide(tiny.depths[0]), final_norm(tiny.trunk)
    want = head_pass(family, weights, hidden, embedded[:WIDTH], last)
    fed_back = np.concatenate([hidden, want[-1:]])
    want_deeper = head_pass(family, weights, fed_back, embedded, last)[-1:]
    for got, expected in ((mx.concatenate([first, rest]), want), (deeper, want_deeper)):
        logits = np.array(tiny.trunk.logits(got[None])[0])
        assert error(logits, expected @ projection(tiny.trunk).T) <= 1e-4
    swapped = head_pass(family, weights, embedded[:WIDTH], hidden, last)
    assert error(np.array(rest), swapped[4:]) > 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_published_and_converted_files_give_the_same_parameters(tmp_path: Path, family: str) -> None:
    from mlx.utils import tree_flatten

    tiny = tiny_head(family)
    one, two = (loaded(tiny, form, tmp_path / form).layers[0] for form in FORMS)
    for (name, a), (_, b) in zip(tree_flatten(one.parameters()), tree_flatten(two.parameters()), strict=True):
        np.testing.assert_allclose(np.array(a), np.array(b), atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3_5", "qwen"),
        ("glm4_moe", "nextn"),
        ("mimo", "mimo"),
        ("mimo_v2_flash", "mimo_v2"),
        ("ernie4_5", "ernie"),
        ("exaone_moe", "qwen"),
        ("longcat_flash", "longcat"),
        ("nemotron_h", "nemotron_h"),
    ],
)
def test_a_layout_is_known_by_its_names(tmp_path: Path, family: str, layout: str) -> None:
    tiny = tiny_head(family)
    found = locate_file(write(tmp_path / "head.safetensors", tiny.published()), tiny.config)
    assert found.tensors.layout.name == layout
    assert set(found.stored) == set(tiny.published())
    for name, (depth, ours) in found.tensors.targets.items():
        if layout != "nemotron_h" or ours != "norm.weight":
            assert found.tensors.original(depth or 0, ours) == name


def test_families_that_keep_several_caches_or_a_window_say_so(tmp_path: Path) -> None:
    indexed = tiny_head("deepseek_v32")
    (module,) = loaded(indexed, "published", tmp_path / "a").layers
    layout = head_layout(module, indexed.trunk)
    assert isinstance(layout, tuple)
    assert len(layout) == 2
    sliding = tiny_head("mimo_v2_flash")
    (module,) = loaded(sliding, "published", tmp_path / "b").layers
    layout = head_layout(module, sliding.trunk)
    assert isinstance(layout, KVSpec)
    assert layout.window == 7


def test_an_exaone_head_may_slide(tmp_path: Path) -> None:
    tiny = tiny_head("exaone_moe", mtp_layer_types=["sliding_attention"], mtp_sliding_windows=[5])
    (module,) = loaded(tiny, "published", tmp_path).layers
    layout = head_layout(module, tiny.trunk)
    assert isinstance(layout, KVSpec)
    assert layout.window == 5
    assert module.layers[0].self_attn.use_rope


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_5"])
def test_eight_bit_floats_with_block_scales_are_made_whole(tmp_path: Path, family: str) -> None:
    tiny = tiny_head(family)
    tensors = tiny.published()
    want: dict[str, Array] = {}
    for name, array in tiny.published().items():
        if array.ndim == 2 and "gate.weight" not in name:
            scale = 0.5 + mx.random.uniform(shape=(1, 1), key=mx.random.key(len(name)))
            tensors[name] = mx.to_fp8(array / scale)
            tensors[f"{name}_scale_inv"] = scale
            want[name] = np.array(mx.from_fp8(tensors[name], mx.float32) * scale)
    head = load_head(write(tmp_path / "mtp.safetensors", tensors), tiny.trunk, config=tiny.config)
    fc = next(name for name in want if name.endswith(("eh_proj.weight", "fc.weight")))
    np.testing.assert_allclose(np.array(head.layers[0].fc.weight), want[fc], rtol=1e-2)


def test_qwens_are_the_families_with_zero_centred_norms(tmp_path: Path) -> None:
    """The control of the tests above: without its 1, a norm is off by far."""
    for family in QWENS:
        tiny = tiny_head(family)
        (module,) = loaded(tiny, "published", tmp_path / family).layers
        norms = [
            module.norm,
            module.pre_fc_norm_embedding,
            module.pre_fc_norm_hidden,
            module.layers[0].self_attn.q_norm,
        ]
        for norm in norms:
            assert norm.weight.min().item() > 0.5
            assert norm.weight.max().item() < 1.5
