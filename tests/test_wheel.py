"""The wheel holds everything that runs, and asks for nothing that only developers need.

`make test-wheel` installs it into an empty environment and asks it a question.
"""

from __future__ import annotations

import email
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LEFT_OUT = {"__pycache__"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """Built from a copy, so that nothing that lies about in this folder comes along."""
    source, made = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("made")
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns(*LEFT_OUT))
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(made)]
    subprocess.run(build, cwd=source, check=True, capture_output=True)
    (file,) = made.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        yield archive


def test_the_wheel_has_every_file_of_the_package(wheel: zipfile.ZipFile) -> None:
    package = ROOT / "src" / "outrider"
    files = {
        f"outrider/{path.relative_to(package).as_posix()}": path.stat().st_size
        for path in package.rglob("*")
        if path.is_file() and not LEFT_OUT & set(path.parts)
    }
    packed = {
        info.filename: info.file_size for info in wheel.infolist() if ".dist-info/" not in info.filename
    }
    assert packed == files
    ends = {Path(name).suffix for name in packed}
    assert ends >= {
        ".html",
        ".js",
        ".css",
        ".safetensors",
        ".cpp",
        ".h",
        ".c",
        ".jinja",
    }  # page, heads, sources


def requirements(wheel: zipfile.ZipFile) -> list[str]:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return email.message_from_bytes(wheel.read(name)).get_all("Requires-Dist") or []


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=!;, ]", requirement)[0] for requirement in requirements}


def test_a_plain_install_asks_for_nothing_of_the_developers(wheel: zipfile.ZipFile) -> None:
    always = names([one for one in requirements(wheel) if "extra ==" not in one])
    assert always == names(PROJECT["dependencies"])
    assert not always & (names(PROJECT["optional-dependencies"]["dev"]) - {"outrider"})


def test_the_command_is_there(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt"))
    assert "outrider = outrider.cli.main:main" in wheel.read(name).decode()
