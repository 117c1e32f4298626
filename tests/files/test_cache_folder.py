"""One cache folder for everything, wherever the user wants it, and where earlier versions had it."""

import sys
from pathlib import Path

import platformdirs
import pytest
from platformdirs.macos import MacOS

from fresh_process import in_fresh_process
from outrider.files.cache_folder import cache_folder
from outrider.models.files.folders import models_folder


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.delenv("OUTRIDER_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.skipif(sys.platform != "linux", reason="the folders of Linux")
def test_on_linux_it_is_where_it_always_was(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    assert cache_folder() == home / ".cache" / "outrider"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "xdg"))
    assert cache_folder() == home / "xdg" / "outrider"


def test_on_macos_an_earlier_folder_is_used_further(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda name, appauthor: MacOS(name).user_cache_dir)
    earlier = home / "Library" / "Caches" / "outrider"
    assert cache_folder() == earlier
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "xdg"))
    earlier.mkdir(parents=True)
    assert cache_folder() == earlier


def test_the_user_may_name_a_folder(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", "~/mine")
    assert cache_folder() == home / "mine"
    assert models_folder() == home / "mine" / "models"


def test_without_a_home_there_is_an_error_and_no_folder_called_tilde(monkeypatch: pytest.MonkeyPatch) -> None:
    import os.path

    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda name, appauthor: f"~/.cache/{name}")
    with pytest.raises(RuntimeError, match="home"):
        cache_folder()


@pytest.mark.skipif(sys.platform != "linux", reason="macOS has Accelerate")
def test_libraries_are_stored_in_the_folder_that_the_user_names(home: Path) -> None:
    report = "from outrider.cpu import blas\nimport json\nfound = {'path': blas.activate().path}"
    found = in_fresh_process(report, OUTRIDER_CACHE=home / "mine", XDG_CACHE_HOME=home / "other")
    assert Path(found["path"]).parent == home / "mine" / "blas"
    assert not (home / "other").exists()
