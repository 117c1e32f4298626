"""The files in deploy/ can be read, and name only flags, files and versions that exist."""

from __future__ import annotations

import hashlib
import os
import plistlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.cli.serve_options import OPTIONS

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
FLAGS = {option.flag for option in OPTIONS.values()}
NOT_FLAGS = {"OUTRIDER_CACHE"}


def flag_of(variable: str) -> str:
    return "--" + variable.removeprefix("OUTRIDER_").lower().replace("_", "-")


@pytest.mark.parametrize("name", ["Dockerfile", "outrider.service", "org.outrider.server.plist", "README.md"])
def test_variables_are_flags_of_the_server(name: str) -> None:
    variables = set(re.findall(r"\bOUTRIDER_[A-Z_]+", (DEPLOY / name).read_text())) - NOT_FLAGS
    assert {v for v in variables if flag_of(v) not in FLAGS and v != "OUTRIDER_MODEL"} == set()


def test_the_unit_is_complete() -> None:
    lines = (DEPLOY / "outrider.service").read_text().splitlines()
    entries = dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
    assert [line for line in lines if line.startswith("[")] == ["[Unit]", "[Service]", "[Install]"]
    assert entries["ExecStart"] == "/opt/outrider/bin/outrider serve"
    assert entries["RestartPreventExitStatus"] == "2"
    assert int(entries["TimeoutStopSec"]) >= OPTIONS["drain"].default + 20


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    """With a command that exists here."""
    unit = tmp_path / "outrider.service"
    text = (DEPLOY / "outrider.service").read_text()
    unit.write_text(text.replace("/opt/outrider/bin/outrider", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    assert "outrider.service" not in done.stdout + done.stderr


def test_the_command_of_launchd_starts_with_its_variables_alone(tmp_path: Path) -> None:
    text = (DEPLOY / "org.outrider.server.plist").read_text().replace("@HOME@", str(tmp_path))
    agent = plistlib.loads(text.encode())
    assert agent["ExitTimeOut"] >= int(agent["EnvironmentVariables"]["OUTRIDER_DRAIN"]) + 20
    command = tmp_path / ".local" / "bin" / "outrider"
    command.parent.mkdir(parents=True)
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m outrider "$@"\n')
    command.chmod(0o755)
    variables = {"HOME": str(tmp_path), "PATH": os.defpath, "OUTRIDER_MODEL": str(tmp_path / "none")}
    if "PYTHONPATH" in os.environ:
        variables["PYTHONPATH"] = os.environ["PYTHONPATH"]
    done = subprocess.run(
        agent["ProgramArguments"],
        env=variables | agent["EnvironmentVariables"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert f"{tmp_path / 'none'}" in done.stderr  # all settings were read; this model does not exist


def test_the_image_copies_files_that_exist_and_pins_every_version() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    for words in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE):
        for name in words.split():
            assert (ROOT / name).exists(), name
    (script,) = re.findall(r"sed -nE '(.+)' /src/requirements.lock", text)
    lock = ROOT / "requirements.lock"
    pinned = subprocess.run(["sed", "-nE", script, str(lock)], capture_output=True, text=True, check=True)
    names = re.findall(r"^([a-z0-9.-]+==\S+)", lock.read_text(), re.MULTILINE)
    assert [line.split(" ; ")[0] for line in pinned.stdout.splitlines()] == names
    assert "\\" not in pinned.stdout


def formula(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(DEPLOY / "formula.py"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_formula_has_the_archives_version_and_checksum(tmp_path: Path) -> None:
    archive = tmp_path / "outrider-1.2.3.tar.gz"
    archive.write_bytes(b"content")
    made = formula(archive, "https://example.org/outrider-1.2.3.tar.gz")
    assert 'version "1.2.3"' in made.stdout
    assert hashlib.sha256(b"content").hexdigest() in made.stdout
    if (ruby := shutil.which("ruby")) is not None:
        subprocess.run([ruby, "-c"], input=made.stdout, text=True, check=True, capture_output=True)


def test_a_formula_of_something_else_is_refused(tmp_path: Path) -> None:
    (other := tmp_path / "other.tar.gz").write_bytes(b"")
    assert "no source archive" in formula(other, "https://example.org/x").stderr
    (archive := tmp_path / "outrider-1.0.tar.gz").write_bytes(b"")
    assert "no https: or file: address" in formula(archive, 'x"; system("date")').stderr
