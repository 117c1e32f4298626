"""MTP heads: files that are read or refused, and the forward pass against plain NumPy."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from outrider.cache.placement import Placement
from outrider.cache.ragged_kv import LayerView, RaggedKV
from outrider.models.heads import HeadError, HeadSpec, LoadedHead, MTPHead, find_head, load_head, new_head
from outrider.models.heads import head_kv_spec as kv_spec_of
from outrider.models.trunk import Trunk
from outrider.request import SamplingParams
from outrider.sampling.sampler import Sampler
from outrider.step.head_rows import HeadRows
from outrider.step.mtp import MTPDrafter
from ragged_rows import error
from tiny_models import VOCAB_SIZE, fill, tiny_model

Array = np.ndarray
Weights = dict[str, Array]
HEAD_STEPS = [  # pairs fed to each of three rows, and pairs that it keeps
    ([7, 2, 5], [7, 2, 5]),
    ([4, 1, 2], [1, 1, 2]),
    ([1, 1, 1], [1, 1, 1]),
    ([2, 5, 3], [2, 5, 3]),
]
HEADED = ["llama", "qwen3", "qwen3_moe", "deepseek_v3", "glm4_moe"]


def _trunk(family: str = "llama") -> Trunk:
    changes = {"rope_scaling": None} if family == "llama" else {}
    return Trunk(tiny_model(family, **changes), max_context=256)


def _head(trunk: Trunk, spec: HeadSpec | None = None) -> MTPHead:
    head = new_head(trunk, spec)
    fill(head, seed=5)
    return head


def _tensors(head: MTPHead) -> dict[str, mx.array]:
    return {f"mtp.{name}": array for name, array in tree_flatten(head.parameters())}


def _write(folder: Path, tensors: dict[str, mx.array]) -> Path:
    file = folder / "mtp.safetensors"
    mx.save_safetensors(str(file), tensors)
    return file


def _some(shape: tuple[int, ...], seed: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def _ragged(head: MTPHead, trunk: Trunk, num_slots: int, capacity: int = 32) -> RaggedKV:
    kv = RaggedKV(kv_spec_of(head, trunk))
    kv.resize(num_slots, capacity)
    return kv


def _pass(
    head: MTPHead, kv: RaggedKV, slots: list[int], starts: list[int], hidden: mx.array, embedded: mx.array
) -> tuple[mx.array, mx.array]:
    """Feed all rows the same number of pairs."""
    width = hidden.shape[1]
    capacity = kv.keys.shape[2] - 1
    num_fed = mx.full((len(slots),), width)
    place = Placement(slots, mx.array(starts), num_fed, width, max(starts) + width, capacity)
    return head(hidden, embedded, LayerView(kv, place))


# files


@pytest.mark.parametrize("family", HEADED)
def test_a_head_is_loaded_as_it_was_saved(tmp_path: Path, family: str) -> None:
    trunk = _trunk(family)
    saved = _head(trunk)
    loaded = load_head(_write(tmp_path, _tensors(saved)), trunk)
    assert loaded.source == str(tmp_path / "mtp.safetensors")
    assert loaded.draft_ids is None
    (module,) = loaded.layers
    assert kv_spec_of(module, trunk) == kv_spec_of(saved, trunk)
    hidden, embedded = _some((2, 5, 64), 1), _some((2, 5, 64), 2)
    for got, want in zip(
        _pass(module, _ragged(module, trunk, 2), [0, 1], [0, 0], hidden, embedded),
        _pass(saved, _ragged(saved, trunk, 2), [0, 1], [0, 0], hidden, embedded),
        strict=True,
    ):
        np.testing.assert_array_equal(np.array(got), np.array(want))


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "glm4_moe"])
def test_the_head_of_a_mixture_has_experts(family: str) -> None:
    names = _tensors(new_head(_trunk(family)))
    assert any("switch_mlp" in name for name in names)


def test_a_head_takes_the_trunks_dtype(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    model.set_dtype(mx.bfloat16)
    trunk = Trunk(model, max_context=64)
    head = load_head(_write(tmp_path, _tensors(_head(trunk))), trunk)
    assert {array.dtype for _, array in tree_flatten(head.layers[0].parameters())} == {mx.bfloat16}
    assert kv_spec_of(head.layers[0], trunk).dtype == mx.bfloat16


def test_tensors_of_others_in_the_file_are_left_alone(tmp_path: Path) -> None:
    trunk = _trunk()
    load_head(_write(tmp_path, _tensors(_head(trunk)) | {"model.norm.weight": mx.ones(3)}), trunk)


@pytest.mark.parametrize("name", ["mtp/weights.safetensors", "mtp.safetensors"])
def test_a_head_beside_a_model_is_found(tmp_path: Path, name: str) -> None:
    assert find_head(tmp_path) is None
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    assert find_head(tmp_path) == tmp_path / name


def test_a_missing_head_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(HeadError, match=r"mtp\.safetensors: no such head file"):
        load_head(tmp_path / "mtp.safetensors", _trunk())


@pytest.mark.parametrize("kept", [0, 5, 200, 5000])
def test_a_head_file_that_is_cut_short_is_named(tmp_path: Path, kept: int) -> None:
    trunk = _trunk()
    file = _write(tmp_path, _tensors(_head(trunk)))
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(HeadError, match=r"mtp\.safetensors cannot be read"):
        load_head(file, trunk)


def test_an_unknown_layout_is_refused(tmp_path: Path) -> None:
    file = _write(tmp_path, {"eagle.layers.0.weight": mx.ones((2, 2))})
    with pytest.raises(HeadError, match=r"no MTP head of a known layout"):
        load_head(file, _trunk())


@pytest.mark.parametrize("name", ["mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.self_attn.k_proj.weight"])
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    trunk = _trunk()
    tensors = _tensors(_head(trunk))
    del tensors[name]
    with pytest.raises(HeadError, match="only part of a head") as caught:
        load_head(_write(tmp_path, tensors), trunk)
    assert name in str(caught.value)


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    trunk = _trunk()
    tensors = _tensors(_head(trunk)) | {"mtp.layers.0.surprise.weight": mx.ones(3)}
    with pytest.raises(HeadError, match=r"mtp\.layers\.0\.surprise\.weight"):
        load_head(_write(tmp_path, tensors), trunk)


@pytest.mark.parametrize(("name", "shape"), [("mtp.fc.weight", (64, 64)), ("mtp.norm.weight", (32,))])
def test_a_tensor_of_another_shape_is_named(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    trunk = _trunk()
    tensors = _tensors(_head(trunk)) | {name: mx.ones(shape)}
    with pytest.raises(HeadError, match="a head for another model") as caught:
        load_head(_write(tmp_path, tensors), trunk)
    assert f"{name} is {list(shape)}" in str(caught.value)


def test_the_head_of_another_model_is_refused(tmp_path: Path) -> None:
    file = _write(tmp_path, _tensors(_head(_trunk("llama"))))
    with pytest.raises(HeadError, match=r"mtp\.safetensors"):
        load_head(file, _trunk("deepseek_v3"))


@pytest.mark.parametrize("family", ["deepseek_v32", "gemma4_text", "mistral4", "cohere", "gpt2"])
def test_a_family_whose_layer_cannot_be_a_head_is_told_so(family: str) -> None:
    trunk = _trunk(family)
    with pytest.raises(HeadError, match="MTP head"):
        kv_spec_of(new_head(trunk), trunk)


# the draft vocabulary


def test_draft_ids_in_the_file_are_used_in_ascending_order(tmp_path: Path) -> None:
    trunk = _trunk()
    file = _write(tmp_path, _tensors(_head(trunk)) | {"mtp.draft_ids": mx.array([40, 7, 99, 3])})
    whole, reduced = load_head(file, trunk).draft_ids, load_head(file, trunk, draft_vocabulary=2).draft_ids
    assert whole is not None
    assert reduced is not None
    assert whole.tolist() == [3, 7, 40, 99]
    assert reduced.tolist() == [7, 40]  # the two most frequent


def test_a_few_of_the_rarest_draft_ids_are_left_out_so_that_their_weights_can_be_interleaved(
    tmp_path: Path,
) -> None:
    trunk, ranked = _trunk(), list(range(40))[::-1]
    file = _write(tmp_path, _tensors(_head(trunk)) | {"mtp.draft_ids": mx.array(ranked)})
    ids = load_head(file, trunk).draft_ids
    assert ids is not None
    assert ids.tolist() == list(range(8, 40))


def test_draft_ids_may_lie_beside_the_file(tmp_path: Path) -> None:
    trunk = _trunk()
    file = _write(tmp_path, _tensors(_head(trunk)))
    (tmp_path / "freq.json").write_text(json.dumps({"ids": [40, 7]}))
    ids = load_head(file, trunk).draft_ids
    assert ids is not None
    assert ids.tolist() == [7, 40]


@pytest.mark.parametrize("content", ["{", "{}", "[]", '{"ids": "seven"}', '{"ids": [[1], [2, 3]]}'])
def test_a_broken_list_of_draft_ids_is_named(tmp_path: Path, content: str) -> None:
    trunk = _trunk()
    file = _write(tmp_path, _tensors(_head(trunk)))
    (tmp_path / "freq.json").write_text(content)
    with pytest.raises(HeadError, match=r"freq\.json"):
        load_head(file, trunk)


@pytest.mark.parametrize("ids", [[0, VOCAB_SIZE], [-1, 5], [], [[1, 2], [3, 4]]])
def test_draft_ids_that_the_model_does_not_have_are_refused(tmp_path: Path, ids: list) -> None:
    trunk = _trunk()
    file = _write(tmp_path, _tensors(_head(trunk)) | {"mtp.draft_ids": mx.array(ids, mx.int32)})
    with pytest.raises(HeadError, match="draft_ids"):
        load_head(file, trunk)


@pytest.mark.parametrize(
    "family", ["llama", "qwen3"]
)  # with an output layer of its own; with tied embeddings
def test_reduced_drafts_are_the_full_projections_best_among_the_ids(family: str) -> None:
    trunk = _trunk(family)
    ids = mx.array([2, 3, 17, 40, 41, 88, 110])
    head = _head(trunk)
    drafter = MTPDrafter(LoadedHead((head,), "here", ids), trunk)
    for kv in drafter.buffers():
        kv.resize(3, 32)
    hidden, next_ids = _some((3, 6, 64), 3), mx.random.randint(0, VOCAB_SIZE, (3, 6), key=mx.random.key(4))
    rows = HeadRows(
        slots=[0, 1, 2],
        starts=mx.zeros(3, mx.int32),
        num_fed=mx.full((3,), 6),
        num_committed=mx.array([6, 3, 1]),
        end=6,
        sampler=Sampler.of([SamplingParams(temperature=0.0)] * 3),
        depth=1,
    )
    drafts = drafter.draft(hidden, next_ids, rows, 32)
    assert drafts is not None
    out, _ = _pass(head, _ragged(head, trunk, 3), [0, 1, 2], [0, 0, 0], hidden, trunk.embed(next_ids))
    full = trunk.logits(out)
    best = [ids[int(mx.argmax(full[row, num - 1, ids]).item())].item() for row, num in enumerate([6, 3, 1])]
    assert drafts.token_ids[:, 0].tolist() == best


# the forward pass


def _norm(x: Array, weight: Array, eps: float = 1e-5) -> Array:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def _rope(x: Array, positions: Array, base: float = 10000.0) -> Array:
    """Rotate the two halves of each head.  [cells, heads, dim]"""
    half = x.shape[-1] // 2
    angles = positions[:, None] * base ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def _attention(x: Array, w: Weights) -> Array:
    cells = np.arange(len(x))
    q = _rope((x @ w["q_proj"].T).reshape(len(x), 4, 16), cells)
    k = _rope((x @ w["k_proj"].T).reshape(len(x), 2, 16), cells).repeat(2, axis=1)
    v = (x @ w["v_proj"].T).reshape(len(x), 2, 16).repeat(2, axis=1)
    scores = np.einsum("ihd,jhd->hij", q, k) / 4.0
    scores = np.where(cells[:, None] >= cells, scores, -np.inf)
    share = np.exp(scores - scores.max(axis=-1, keepdims=True))
    share /= share.sum(axis=-1, keepdims=True)
    return np.einsum("hij,jhd->ihd", share, v).reshape(len(x), 64) @ w["o_proj"].T


def _reference(
    head: MTPHead, hidden: Array, embedded: Array, embedding_first: bool = True
) -> tuple[Array, Array]:
    """(out, the layer's output before the norm) of one row from its first pair on, in float64."""
    w = {
        name.removesuffix(".weight"): np.array(array).astype(np.float64)
        for name, array in tree_flatten(head.parameters())
    }
    layer = {name.rpartition(".")[2]: array for name, array in w.items() if name.startswith("layers.0.")}
    parts = [_norm(embedded, w["pre_fc_norm_embedding"]), _norm(hidden, w["pre_fc_norm_hidden"])]
    x = np.concatenate(parts if embedding_first else parts[::-1], axis=-1) @ w["fc"].T
    x = x + _attention(_norm(x, layer["input_layernorm"]), layer)
    y = _norm(x, layer["post_attention_layernorm"])
    gate = y @ layer["gate_proj"].T
    x = x + (gate / (1 + np.exp(-gate)) * (y @ layer["up_proj"].T)) @ layer["down_proj"].T
    return _norm(x, w["norm"]), x


@pytest.mark.parametrize("embedding_first", [True, False])
def test_the_forward_pass_equals_plain_numpy(embedding_first: bool) -> None:
    trunk = _trunk()
    head = _head(trunk, HeadSpec(embedding_first=embedding_first))
    hidden, embedded = _some((1, 9, 64), 1), _some((1, 9, 64), 2)
    kv = _ragged(head, trunk, num_slots=2)
    first, _ = _pass(head, kv, [1], [0], hidden[:, :5], embedded[:, :5])
    rest, _ = _pass(head, kv, [1], [5], hidden[:, 5:], embedded[:, 5:])
    want, _ = _reference(head, np.array(hidden[0]), np.array(embedded[0]), embedding_first)
    got = mx.concatenate([first, rest], axis=1)
    assert error(np.array(got[0]), want) <= 1e-4
    projection = np.array(trunk.model.lm_head.weight)
    assert error(np.array(trunk.logits(got)[0]), want @ projection.T) <= 1e-4
    swapped, _ = _reference(head, np.array(hidden[0]), np.array(embedded[0]), not embedding_first)
    assert error(np.array(got[0]), swapped) > 1e-2


@pytest.mark.parametrize("after_norm", [True, False])
def test_recursion_feeds_back_what_the_spec_says(after_norm: bool) -> None:
    """Depth by depth, against a reference that sees every pair at once."""
    trunk = _trunk()
    head = _head(trunk, HeadSpec(recurse_after_norm=after_norm))
    hidden, embedded = _some((1, 4, 64), 1), _some((1, 7, 64), 2)
    kv = _ragged(head, trunk, num_slots=1)
    out, back = _pass(head, kv, [0], [0], hidden, embedded[:, :4])
    fed = np.array(hidden[0])
    for depth in range(3):
        want = _reference(head, fed, np.array(embedded[0, : 4 + depth]))
        assert error(np.array(out[0, -1]), want[0][-1]) <= 1e-4
        fed = np.concatenate([fed, want[0 if after_norm else 1][-1:]])
        next_pair = embedded[:, 4 + depth : 5 + depth]
        out, back = _pass(head, kv, [0], [4 + depth], back[:, -1:], next_pair)


def test_a_pair_at_the_wrong_position_shows() -> None:
    """The control of the two tests above: position t of the cache is position t of the rope."""
    trunk = _trunk()
    head = _head(trunk)
    hidden, embedded = _some((1, 9, 64), 1), _some((1, 9, 64), 2)
    kv = _ragged(head, trunk, num_slots=1)
    _pass(head, kv, [0], [0], hidden[:, :5], embedded[:, :5])
    late, _ = _pass(head, kv, [0], [6], hidden[:, 5:], embedded[:, 5:])
    want, _ = _reference(head, np.array(hidden[0]), np.array(embedded[0]))
    assert error(np.array(late[0]), want[5:]) > 1e-2


@pytest.mark.parametrize("family", [*HEADED, "ministral3"])  # whose layers take a scale before the mask
def test_batched_head_rows_equal_solo_rows(family: str) -> None:
    """Three rows of different lengths in slots out of order, over junk, with padding and rollbacks."""
    trunk = _trunk(family)
    head = _head(trunk)
    hidden, embedded = _some((3, 20, 64), 1), _some((3, 20, 64), 2)
    solo = [
        np.array(_pass(head, _ragged(head, trunk, 1), [0], [0], hidden[r : r + 1], embedded[r : r + 1])[0][0])
        for r in range(3)
    ]
    kv = _ragged(head, trunk, num_slots=5)
    kv.keys, kv.values = 1e3 * _some(kv.keys.shape, 3), 1e3 * _some(kv.values.shape, 4)
    starts = np.zeros(3, np.int32)
    for fed, kept in HEAD_STEPS:
        width, ends = max(fed), starts + fed
        columns = mx.array(np.minimum(starts[:, None] + np.arange(width), 19))[..., None]
        place = Placement([4, 0, 2], mx.array(starts), mx.array(fed), width, int(ends.max()), capacity=32)
        pairs = [mx.take_along_axis(x, columns, axis=1) for x in (hidden, embedded)]
        out, _ = head(*pairs, LayerView(kv, place))
        for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
            assert error(np.array(out[row, : fed[row]]), solo[row][start:end]) <= 1e-5
        starts = starts + kept
