"""`make audit` fails unless every package was looked up and none is vulnerable."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("output", "status", "expected", "says"),
    [
        ("No known vulnerabilities found", 0, 0, "No known vulnerabilities"),
        ("Found 2 known vulnerabilities in 1 package", 1, 1, "Found 2"),
        ("ERROR:pip_audit._cli:jinja2: Dependency not found on PyPI", 1, 2, "NOT audited"),
        ("requests.exceptions.ConnectionError: no route to host", 1, 2, "NOT audited"),
    ],
)
def test_an_audit_that_did_not_happen_is_a_failure(
    tmp_path: Path, output: str, status: int, expected: int, says: str
) -> None:
    tool = tmp_path / "bin" / "pip-audit"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\necho "{output}"\nexit {status}\n')
    tool.chmod(0o755)
    run = subprocess.run([ROOT / ".ci" / "audit", tmp_path], capture_output=True, text=True)
    assert run.returncode == expected
    assert says in run.stdout + run.stderr
