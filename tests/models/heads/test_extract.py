"""Taking a head out of an original checkpoint: only what holds it is fetched, and it is the same head."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from models.head_checkpoints import TinyHead, tiny_head, write
from outrider.cli.main import main
from outrider.models.heads import HeadError, LoadedHead, Quantization, find_head, load_head
from outrider.models.heads.extract import extract
from outrider.models.heads.head_files import read_header
from outrider.models.heads.originals import HubOriginal, LocalOriginal, original
from tiny_models import save_checkpoint

TRUNK, HEAD = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def write_original(folder: Path, head: TinyHead) -> Path:
    """In two shards, the head in the second, with an index, as they are published."""
    trunk = {"model.embed_tokens.weight": mx.zeros((8, 64)), "lm_head.weight": mx.zeros((8, 64))}
    write(folder / TRUNK, trunk, {"format": "pt"})
    write(folder / HEAD, head.published() | {"model.norm.weight": mx.zeros(64)}, {"format": "pt"})
    shards = dict.fromkeys(trunk, TRUNK) | dict.fromkeys([*head.published(), "model.norm.weight"], HEAD)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    (folder / "config.json").write_text(json.dumps(head.config))
    return folder


def write_converted(folder: Path, head: TinyHead) -> Path:
    """The same model without its head, as a converter leaves it."""
    save_checkpoint(folder, head.model, head.config)
    return folder


def assert_same_head(got: LoadedHead, want: LoadedHead) -> None:
    for one, other in zip(got.layers, want.layers, strict=True):
        ours, theirs = (dict(tree_flatten(layer.parameters())) for layer in (one, other))
        assert ours.keys() == theirs.keys()
        for name, array in ours.items():
            np.testing.assert_array_equal(np.array(array), np.array(theirs[name]))


@pytest.fixture(scope="module")
def qwen() -> TinyHead:
    return tiny_head("qwen3_5")


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "deepseek_v3", "glm4_moe", "mimo", "ernie4_5"])
def test_an_extracted_head_is_the_original_s(tmp_path: Path, family: str) -> None:
    head = tiny_head(family)
    source, into = write_original(tmp_path / "original", head), write_converted(tmp_path / "model", head)

    done = extract(LocalOriginal(source), into)

    assert done.file == into / "mtp/weights.safetensors" == find_head(into)
    assert done.num_tensors == len(head.published())
    got = load_head(into, head.trunk, config=head.config)
    assert_same_head(got, load_head(source, head.trunk, config=head.config))
    assert os.listdir(done.file.parent) == [done.file.name]


def test_a_head_inside_a_conversion_keeps_its_norms(tmp_path: Path, qwen: TinyHead) -> None:
    source = write_original(tmp_path / "original", qwen)
    write(source / HEAD, qwen.converted() | {"model.norm.weight": mx.zeros(64)}, {"format": "mlx"})
    into = write_converted(tmp_path / "model", qwen)
    extract(LocalOriginal(source), into)
    got = load_head(into, qwen.trunk, config=qwen.config)
    norm = dict(tree_flatten(got.layers[0].parameters()))["norm.weight"]
    np.testing.assert_array_equal(np.array(norm), np.array(qwen.converted()["mtp.norm.weight"]))


def test_only_the_shard_with_the_head_is_fetched(
    tmp_path: Path, qwen: TinyHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, into = write_original(tmp_path / "original", qwen), write_converted(tmp_path / "model", qwen)
    fetched = []

    def download(repo_id: str, file: str, revision: str | None) -> str:
        assert repo_id == "someone/a-model"
        fetched.append(file)
        return shutil.copy(source / file, tmp_path / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    extract(original("someone/a-model"), into)
    assert fetched == ["model.safetensors.index.json", "config.json", HEAD]
    assert_same_head(
        load_head(into, qwen.trunk, config=qwen.config), load_head(source, qwen.trunk, config=qwen.config)
    )


def test_a_repository_of_one_file(tmp_path: Path, qwen: TinyHead, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import EntryNotFoundError

    source, into = write_original(tmp_path / "original", qwen), write_converted(tmp_path / "model", qwen)
    (source / HEAD).rename(source / "model.safetensors")

    def download(repo_id: str, file: str, revision: str | None) -> str:
        if file.endswith("index.json"):
            raise EntryNotFoundError("404")
        return str(source / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert extract(HubOriginal("someone/a-model"), into).num_tensors == len(qwen.published())


def test_all_files_are_of_the_commit_of_the_first(
    tmp_path: Path, qwen: TinyHead, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_original(tmp_path / "snapshots" / "c0ffee", qwen)
    into, revisions = write_converted(tmp_path / "model", qwen), []

    def download(repo_id: str, file: str, revision: str | None) -> str:
        revisions.append(revision)
        return str(source / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert main(["mtp", "extract", "someone/a-model", "--revision", "v1", "--into", str(into)]) == 0
    assert revisions == ["v1", "c0ffee", "c0ffee"]
    assert "someone/a-model at commit c0ffee (--revision c0ffee" in capsys.readouterr().out
    metadata = read_header(into / "mtp" / "weights.safetensors")[1]
    assert (metadata["taken_from"], metadata["commit"]) == ("someone/a-model", "c0ffee")
    with pytest.raises(HeadError, match="--revision v1 needs a Hugging Face id"):
        original(str(source), "v1")


def test_a_hub_that_cannot_be_reached(
    qwen: TinyHead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(repo_id: str, file: str, revision: str | None) -> str:
        raise ConnectionError("no route to host")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    with pytest.raises(HeadError, match=r"index\.json could not be fetched \(ConnectionError: no route"):
        extract(original("someone/a-model"), write_converted(tmp_path, qwen))


# -- what is refused -------------------------------------------------------------------------------------


def _changed_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize(("family", "key"), [("qwen3_5", "hidden_size"), ("glm4_moe", "num_hidden_layers")])
def test_the_original_of_another_model(tmp_path: Path, family: str, key: str) -> None:
    head = tiny_head(family)
    source, into = write_original(tmp_path / "original", head), write_converted(tmp_path / "model", head)
    _changed_config(into, **{key: 128})
    with pytest.raises(HeadError, match=f"original of another model: its {key} is .*, that of .* is 128"):
        extract(LocalOriginal(source), into)
    assert find_head(into) is None


def test_an_original_without_a_head(tmp_path: Path, qwen: TinyHead) -> None:
    into = write_converted(tmp_path / "model", qwen)
    lost = write_converted(tmp_path / "lost", qwen)
    with pytest.raises(HeadError, match=r"has no MTP head of a known layout\. Train one"):
        extract(LocalOriginal(lost), into)
    _changed_config(lost, mtp_num_hidden_layers=1)
    with pytest.raises(HeadError, match=r"itself converted without its MTP head\. Name the original"):
        extract(LocalOriginal(lost), into)


def test_an_index_that_promises_more_than_there_is(tmp_path: Path, qwen: TinyHead) -> None:
    source, into = write_original(tmp_path / "original", qwen), write_converted(tmp_path / "model", qwen)
    left = qwen.published()
    del left["mtp.fc.weight"]
    write(source / HEAD, left, {"format": "pt"})

    class Indexed(LocalOriginal):
        def shards(self) -> dict[str, str]:
            index = json.loads((source / "model.safetensors.index.json").read_text())
            return dict(index["weight_map"])

    with pytest.raises(HeadError, match=r"incomplete: its files do not hold mtp\.fc\.weight"):
        extract(Indexed(source), into)
    assert find_head(into) is None


def test_a_shard_that_is_cut_short(tmp_path: Path, qwen: TinyHead) -> None:
    source, into = write_original(tmp_path / "original", qwen), write_converted(tmp_path / "model", qwen)
    whole = (source / HEAD).read_bytes()
    (source / HEAD).write_bytes(whole[:-100])
    with pytest.raises(HeadError, match="cut short"):
        extract(LocalOriginal(source), into)


def test_a_head_that_is_there_is_replaced_only_by_force(tmp_path: Path, qwen: TinyHead) -> None:
    source, into = write_original(tmp_path / "original", qwen), write_converted(tmp_path / "model", qwen)
    extract(LocalOriginal(source), into)
    with pytest.raises(HeadError, match=r"exists already\. Replace it with --force"):
        extract(LocalOriginal(source), into)
    extract(LocalOriginal(source), into, force=True)


def test_a_folder_that_is_no_model(tmp_path: Path, qwen: TinyHead) -> None:
    source = write_original(tmp_path / "original", qwen)
    with pytest.raises(HeadError, match=r"not a model folder: it has no config\.json"):
        extract(LocalOriginal(source), tmp_path / "nothing")


@pytest.mark.parametrize("source", ["./nowhere", "a/b/c", "nowhere"])
def test_a_source_that_is_neither_a_folder_nor_an_id(source: str) -> None:
    with pytest.raises(HeadError, match="no such folder, and not a Hugging Face id"):
        original(source)


@pytest.mark.parametrize("how", [None, Quantization(4)])
def test_a_full_disk_leaves_nothing_behind(
    tmp_path: Path, qwen: TinyHead, monkeypatch: pytest.MonkeyPatch, how: Quantization | None
) -> None:
    source, into = write_original(tmp_path / "original", qwen), write_converted(tmp_path / "model", qwen)

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(HeadError, match="cannot be written: No space left"):
        extract(LocalOriginal(source), into, how=how)
    assert list((into / "mtp").iterdir()) == []


# -- the commands ----------------------------------------------------------------------------------------


def test_extract_then_inspect(tmp_path: Path, qwen: TinyHead, capsys: pytest.CaptureFixture[str]) -> None:
    source, into = write_original(tmp_path / "original", qwen), write_converted(tmp_path / "model", qwen)
    _changed_config(into, mtp_num_hidden_layers=1)

    assert main(["mtp", "inspect", str(into)]) == 1
    said = capsys.readouterr().out
    assert "has no MTP head" in said
    assert f"outrider mtp extract ORIGINAL --into {into}" in said

    assert main(["mtp", "extract", str(source), "--into", str(into)]) == 0
    assert f"outrider mtp inspect {into}" in capsys.readouterr().out

    assert main(["mtp", "inspect", str(into), "--files-only"]) == 0
    said = capsys.readouterr().out
    assert "qwen, one layer" in said
    assert "F32" in said

    assert (
        main(["mtp", "inspect", str(into), "--json", "--tokens", "12", "--rows", "2", "--rounds", "2"]) == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["head"]["layout"] == "qwen"
    assert [one["temperature"] for one in found["acceptance"]] == [0.0, 0.8]
    for one in found["acceptance"]:
        assert len(one["by_position"]) == 3
        assert 1 <= one["tokens_a_step"] <= 4
    (speed,) = found["speed"]
    assert speed["rows"] == 2
    assert len(speed["rounds"]) == 2
    assert speed["ratio"] > 0


def test_a_model_that_never_had_a_head_is_offered_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = tiny_head("qwen3_5")
    into = write_converted(tmp_path / "model", head)
    assert main(["mtp", "inspect", str(into), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["head"] is None
    assert main(["mtp", "inspect", str(into)]) == 1
    assert "Train one: outrider mtp train" in capsys.readouterr().out


def test_extract_says_what_is_wrong_and_ends_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["mtp", "extract", "./nowhere", "--into", str(tmp_path)]) == 2
    assert "no such folder" in capsys.readouterr().err
