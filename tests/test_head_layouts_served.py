"""Models of every head layout through the Python API: the head is found, drafts, and changes no token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from models.head_checkpoints import QWENS, TinyHead, packed, tiny_head, write
from outrider import LLM, InvalidConfig, SamplingParams
from outrider.models.heads import HeadError
from tiny_models import END_ID, save_checkpoint

PROMPTS = [[5, 9, 2, 40, 41, 7], [3], list(range(20, 45)), [88, 1, 4] * 5]
PLAIN = ("auto",) * 4  # what an engine without a drafter can honour
SERVED = [
    ("qwen3_5", 1), ("qwen3_5_moe", 1), ("qwen3_next", 1), ("deepseek_v3", 1), ("deepseek_v32", 1),
    ("glm4_moe", 2), ("mimo", 2), ("mimo_v2_flash", 3), ("ernie4_5", 1), ("exaone_moe", 1),
    ("longcat_flash", 1), ("nemotron_h", 1),
]  # fmt: skip


def write_model(folder: Path, tiny: TinyHead, head: dict[str, mx.array]) -> Path:
    """A converted trunk with a head inside its one file."""
    save_checkpoint(folder, tiny.model, tiny.config | {"eos_token_id": END_ID})
    trunk: dict[str, mx.array] = dict(tree_flatten(tiny.model.parameters()))
    write(folder / "model.safetensors", trunk | head, {"format": "mlx"})
    return folder


def answers(folder: Path, depths: Any = (4, 1, 3, 2), **settings: Any) -> tuple[list[list[int]], int]:
    """Tokens of greedy and sampled requests of uneven depths, and how many drafts were made."""
    params = [
        SamplingParams(max_tokens=14, temperature=0.8 * (i % 2), seed=i, ignore_eos=True, draft_depth=depth)
        for i, depth in enumerate(depths)
    ]
    with LLM(folder, max_rows=3, **settings) as llm:
        outs = llm.generate(PROMPTS, params)
    return [list(out.token_ids) for out in outs], sum(sum(out.stats.drafted) for out in outs)


@pytest.mark.parametrize(("family", "num_depths"), SERVED)
def test_a_models_own_head_drafts_and_changes_no_token(tmp_path: Path, family: str, num_depths: int) -> None:
    tiny = tiny_head(family, num_depths)
    head = tiny.converted() if family in QWENS else tiny.published()
    folder = write_model(tmp_path / "model", tiny, head)
    plain, none = answers(folder, depths=PLAIN, drafter="none")
    drafted, num_drafts = answers(folder, prefill_step_size=4)
    assert none == 0
    assert num_drafts > 20
    assert drafted == plain


QUANTISED = [  # each layout once
    ("qwen3_5_moe", 1, 4), ("glm4_moe", 2, 5), ("mimo", 2, 6), ("mimo_v2_flash", 2, 8), ("ernie4_5", 1, 4),
    ("longcat_flash", 1, 5), ("nemotron_h", 1, 6),
]  # fmt: skip


@pytest.mark.parametrize(("family", "num_depths", "bits"), QUANTISED)
def test_a_quantised_head_drafts_and_changes_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, num_depths: int, bits: int
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("outrider.models.dtypes.keeps_quantized", lambda dtype: asked.append(dtype) is None)
    tiny = tiny_head(family, num_depths)
    head = packed(tiny.converted(), lambda name: (8 if "fc" in name else bits, 32))
    folder = write_model(tmp_path / "model", tiny, head)
    plain, _ = answers(folder, depths=PLAIN, drafter="none")
    drafted, num_drafts = answers(folder, prefill_step_size=4)
    assert len(asked) == num_depths  # the layers of the head; the trunks are not quantised
    assert num_drafts > 20
    assert drafted == plain


def _published_trunk(tiny: TinyHead) -> dict[str, mx.array]:
    """A tiny Qwen3.5 as published: vision's names, PyTorch's convolutions, zero-centred norms."""
    found = {}
    for name, array in tree_flatten(tiny.model.parameters()):
        centred = ("layernorm.weight", "q_norm.weight", "k_norm.weight", "language_model.model.norm.weight")
        if name.endswith("conv1d.weight"):
            array = array.moveaxis(2, 1)
        elif name.endswith(centred):
            array = array - 1
        found[
            name.replace("language_model.model.", "model.language_model.").replace("language_model.lm", "lm")
        ] = array
    return found


def test_a_published_and_a_converted_checkpoint_draft_alike(tmp_path: Path) -> None:
    tiny = tiny_head("qwen3_5")
    converted = write_model(tmp_path / "converted", tiny, tiny.converted())
    published = tmp_path / "published"
    save_checkpoint(published, tiny.model, tiny.config | {"eos_token_id": END_ID})
    write(published / "model.safetensors", _published_trunk(tiny) | tiny.published(), {"format": "pt"})
    assert _drafts(published) == _drafts(converted)


def _drafts(folder: Path) -> list[Any]:
    """What was accepted where: the same drafts stand only if the heads are the same."""
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, draft_depth=3)
    with LLM(folder) as llm:
        outs = llm.generate(PROMPTS, params)
    return [(list(out.token_ids), list(out.stats.drafted), list(out.stats.accepted)) for out in outs]


@pytest.mark.parametrize(("family", "bits"), [("glm4_moe", 8), ("mimo", 4), ("ernie4_5", 6)])
def test_a_head_is_loaded_with_a_quantised_trunk(tmp_path: Path, family: str, bits: int) -> None:
    import mlx.nn as nn

    tiny = tiny_head(family)
    nn.quantize(tiny.model, group_size=32, bits=bits)
    tiny.config["quantization"] = {"group_size": 32, "bits": bits}
    head = {name: array.astype(mx.bfloat16) for name, array in tiny.published().items()}
    folder = write_model(tmp_path / "model", tiny, head)
    plain, _ = answers(folder, depths=PLAIN, drafter="none")
    drafted, num_drafts = answers(folder)
    assert drafted == plain
    assert num_drafts > 20


def test_a_conversion_without_its_head_is_told_apart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny = tiny_head("glm4_moe")
    tiny.config["num_nextn_predict_layers"] = 1
    folder = write_model(tmp_path / "model", tiny, {})
    with pytest.raises(InvalidConfig, match="converted without its MTP head") as caught:
        answers(folder, drafter="mtp")
    assert f"outrider mtp extract ORIGINAL --into {folder}" in str(caught.value)
    tokens, num_drafts = answers(folder, depths=PLAIN)
    assert "converted without its MTP head" in caplog.text
    assert num_drafts == 0
    assert tokens == answers(folder, depths=PLAIN, drafter="none")[0]


def test_a_model_that_never_had_a_head_is_not_said_to_have_lost_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_model(tmp_path / "model", tiny_head("glm4_moe"), {})
    answers(folder, depths=PLAIN)
    assert "MTP head" not in caplog.text
    with pytest.raises(InvalidConfig, match="needs an MTP head"):
        answers(folder, drafter="mtp")


def test_a_head_of_an_unknown_kind_does_not_keep_its_model_from_being_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    head = {name: array for name, array in tiny_head("glm4_moe").published().items() if "mlp" not in name}
    tiny = tiny_head("mimo")
    folder = write_model(tmp_path / "model", tiny, head)
    answers(folder, depths=PLAIN)
    assert "of an unknown kind" in caplog.text
    with pytest.raises(HeadError, match="of an unknown kind"):
        answers(folder, drafter="mtp")


def test_half_a_head_inside_a_checkpoint_stops_the_start_if_the_head_is_demanded(tmp_path: Path) -> None:
    tiny = tiny_head("glm4_moe")
    head = tiny.published()
    del head["model.layers.3.enorm.weight"]
    folder = write_model(tmp_path / "model", tiny, head)
    with pytest.raises(HeadError, match=r"model\.layers\.3\.enorm\.weight is missing"):
        answers(folder, drafter="mtp")
    answers(folder, depths=PLAIN)  # with a warning
    answers(folder, depths=PLAIN, drafter="none")
