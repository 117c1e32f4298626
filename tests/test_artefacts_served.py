"""One folder with language model, vision encoder and MTP head, in the forms that people have, served whole.

Pictures and text share a batch, drafts of the head inside stand in both, and change no token.
"""

from __future__ import annotations

import gc
import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from image_files import noise
from outrider import LLM, Completion, SamplingParams
from outrider.cli.main import main
from outrider.files.safetensors import read_header
from outrider.models import dtypes
from outrider.models.heads import find_head, load_head, locate
from outrider.models.loader import load
from tiny_artefacts import (
    DENSE,
    MOE,
    add_head,
    convert_with_mlx_lm,
    convert_with_mlx_vlm,
    write_published,
)
from video_files import clip

NUM_TOKENS = 24
WHITE = np.full((24, 40, 3), 255, np.uint8)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The published folders, in bfloat16."""
    folder = tmp_path_factory.mktemp("originals")
    return {family: write_published(folder / family, family) for family in (DENSE, MOE)}


def about(*pictures: Any, kind: str = "image") -> list[dict[str, Any]]:
    parts = [{"type": kind, kind: picture} for picture in pictures]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "what is it?"}]}]


CONVERSATIONS = [
    about(noise(40, 24, 1)),
    about(WHITE),
    about(),
    about(noise(16, 16), noise(24, 16, 3)),
    about(clip(6, 32, 24), kind="video"),
]


def answers(llm: LLM, depth: int | str) -> list[Completion]:
    """Pictures and text in one batch, greedy and sampled rows."""
    params = [
        SamplingParams(
            max_tokens=NUM_TOKENS, temperature=0.6 * (i == 3), seed=i, ignore_eos=True, draft_depth=depth
        )
        for i in range(len(CONVERSATIONS))
    ]
    return llm.chat(CONVERSATIONS, params)


def accepted(answer: Completion) -> int:
    return sum(answer.stats.accepted)


def check_served(folder: Path, **settings: Any) -> None:
    with LLM(folder, max_rows=4, **settings) as llm:
        assert llm.engine.facts.reads_images
        assert llm.renderer.video_reader is not None
        assert llm.engine.facts.drafter == "mtp"
        plain, drafted = answers(llm, 0), answers(llm, 3)
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
    assert [accepted(one) for one in plain] == [0] * len(plain)
    for answer in drafted[:-1]:
        assert accepted(answer) >= NUM_TOKENS // 4, [one.stats for one in drafted]
    assert accepted(drafted[-1]) > 0  # of the video
    first, second = (tuple(one.token_ids) for one in plain[:2])
    assert first != second  # only the picture differs


# -- in every form ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [DENSE, MOE])
def test_a_published_folder_is_served_whole(originals: dict[str, Path], family: str) -> None:
    check_served(originals[family])


CONVERTED = [  # bits of the trunk, bits of the head, prefix of the head's names
    (DENSE, 4, 4, "language_model."),
    (DENSE, 5, None, ""),
    (DENSE, None, None, ""),
    (MOE, 4, None, "language_model."),
    (MOE, 8, 8, ""),
]


@pytest.mark.parametrize(("family", "bits", "head_bits", "prefix"), CONVERTED)
def test_a_conversion_with_its_head_inside_is_served_whole(
    originals: dict[str, Path],
    tmp_path: Path,
    family: str,
    bits: int | None,
    head_bits: int | None,
    prefix: str,
) -> None:
    folder = convert_with_mlx_vlm(originals[family], tmp_path / "model", bits)
    check_served(add_head(originals[family], folder, head_bits, prefix))


@pytest.mark.parametrize("family", [DENSE, MOE])
def test_a_quantised_head_inside_stays_quantised(
    originals: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    monkeypatch.setattr(dtypes, "keeps_quantized", lambda dtype: True)
    monkeypatch.setattr(dtypes, "extension", lambda: None)
    folder = add_head(originals[family], convert_with_mlx_vlm(originals[family], tmp_path / "model", 4), 5)
    loaded = load(folder)
    head = load_head(folder, loaded.trunk, config=loaded.config)
    layers = [layer for _, layer in head.layers[0].named_modules() if hasattr(layer, "to_quantized")]
    packed = {layer.bits for _, layer in head.layers[0].named_modules() if hasattr(layer, "bits")}
    assert packed == {5}
    assert len(layers) == (1 if family == MOE else 0)  # the router


@pytest.mark.parametrize("family", [DENSE, MOE])
def test_published_and_converted_folders_give_the_same_tokens_and_drafts(tmp_path: Path, family: str) -> None:
    """So each norm has its 1 exactly once, in trunk and head."""
    published = write_published(tmp_path / "published", family, mx.float32)
    converted = convert_with_mlx_vlm(published, tmp_path / "converted", None)
    add_head(published, converted, None, dtype=mx.float32)
    found = []
    for folder in (published, converted):
        with LLM(folder, max_rows=4) as llm:
            found.append([(one.token_ids, one.stats.accepted) for one in answers(llm, 3)])
    assert found[0] == found[1]


# -- bytes -----------------------------------------------------------------------------------------------


def stored_bytes(folder: Path) -> int:
    headers = []
    for file in folder.glob("*.safetensors"):
        with open(file, "rb") as stream:
            headers.append(read_header(stream))
    return sum(one.num_bytes for header in headers for one in header.tensors.values())


def num_bytes(*parts: Any) -> int:
    return sum(array.nbytes for part in parts for _, array in tree_flatten(part.parameters()))


def check_bytes(folder: Path, needed: int) -> None:
    gc.collect()
    mx.clear_cache()  # a free buffer may be larger than what it is used for
    before = mx.get_active_memory()
    loaded = load(folder, "bfloat16")
    head = load_head(folder, loaded.trunk, config=loaded.config, dtype="bfloat16")
    held = mx.get_active_memory() - before
    assert loaded.vision is not None
    assert num_bytes(loaded.trunk.model, loaded.vision.encoder.model, *head.layers) == needed
    # Rope frequencies and the like are in no file; they are far smaller than the smallest part.
    assert needed <= held < needed + num_bytes(*head.layers) // 2


@pytest.mark.parametrize("family", [DENSE, MOE])
def test_every_byte_of_the_files_is_held_once(originals: dict[str, Path], family: str) -> None:
    check_bytes(originals[family], stored_bytes(originals[family]))


@pytest.mark.parametrize("family", [DENSE, MOE])
def test_a_copy_of_tied_embeddings_is_not_held(
    originals: dict[str, Path], tmp_path: Path, family: str
) -> None:
    """Small Qwen3.5 models tie their projection to the embeddings; some files have a copy of it."""
    folder = tmp_path / "model"
    shutil.copytree(originals[family], folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["tie_word_embeddings"] = config["tie_word_embeddings"] = True
    (folder / "config.json").write_text(json.dumps(config))
    text = config["text_config"]
    check_bytes(folder, stored_bytes(folder) - 2 * text["vocab_size"] * text["hidden_size"])


# -- conversions that lost the head ----------------------------------------------------------------------


@pytest.mark.parametrize("convert", [convert_with_mlx_vlm, convert_with_mlx_lm])
@pytest.mark.parametrize(("family", "flags"), [(DENSE, []), (MOE, ["--bits", "8", "--group-size", "32"])])
def test_a_conversion_that_lost_its_head_gets_it_back_from_the_original(
    originals: dict[str, Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    convert: Any,
    family: str,
    flags: list[str],
) -> None:
    folder = convert(originals[family], tmp_path / "model", 8)
    assert locate(folder) is None
    with LLM(folder, max_rows=4) as llm:
        assert llm.engine.facts.drafter == "none"
        reads_images = llm.engine.facts.reads_images
    assert f"outrider mtp extract ORIGINAL --into {folder}" in caplog.text
    assert reads_images == (convert is convert_with_mlx_vlm)

    assert main(["mtp", "extract", str(originals[family]), "--into", str(folder), *flags]) == 0

    assert find_head(folder) == folder / "mtp" / "weights.safetensors"
    if reads_images:
        check_served(folder)
    else:
        with LLM(folder) as llm:
            params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, draft_depth=3)
            assert accepted(llm.chat(about(), params)) >= NUM_TOKENS // 4


def test_the_drafter_that_mlx_vlm_writes_beside_a_model_is_named_and_taken(
    originals: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`mlx_vlm convert --mtp` writes MODEL and MODEL-mtp, the head quantised like the model."""
    from mlx_vlm.speculative.drafters.qwen3_5_mtp.split import Qwen3_5MTPSplitter

    folder, drafter = convert_with_mlx_vlm(originals[MOE], tmp_path / "model", 4), tmp_path / "model-mtp"
    Qwen3_5MTPSplitter().split(str(originals[MOE]), str(drafter), q_bits=4, q_group_size=32)
    with LLM(folder, max_rows=4) as llm:
        assert llm.engine.facts.drafter == "none"
    assert f"pass --head {drafter}" in caplog.text
    check_served(folder, head=drafter)
