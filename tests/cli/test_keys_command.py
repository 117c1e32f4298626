"""`outrider keys new`: the key is shown once, and the file has its hash."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from outrider.api.keys import ApiKey, KeyLimits, key_hash, parse_keys
from outrider.cli.main import main


def test_a_key_is_printed_once_and_its_hash_is_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys.toml"
    assert main(["keys", "new", "alice", "--file", str(file), "--max-rows", "3"]) == 0
    alice = capsys.readouterr().out.strip()
    assert main(["keys", "new", "ops", "--file", str(file), "--operator"]) == 0
    ops = capsys.readouterr().out.strip()
    assert file.stat().st_mode & 0o777 == 0o600
    assert alice not in file.read_text()
    assert parse_keys(file.read_text()) == {
        key_hash(alice): ApiKey("alice", limits=KeyLimits(max_rows=3)),
        key_hash(ops): ApiKey("ops", is_operator=True),
    }


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["alice"], "has a key alice already"),
        (["a b"], "a name has"),
        (["bob", "--max-rows", "0"], "at least 1"),
    ],
)
def test_what_would_break_the_file_is_not_added(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    file = tmp_path / "keys.toml"
    assert main(["keys", "new", "alice", "--file", str(file)]) == 0
    before = file.read_text()
    capsys.readouterr()
    assert main(["keys", "new", *flags, "--file", str(file)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert words in printed.err
    assert file.read_text() == before


def test_the_file_must_be_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTRIDER_API_KEYS_FILE", raising=False)
    assert main(["keys", "new", "alice"]) == 2
    assert "--file FILE" in capsys.readouterr().err


def test_a_file_that_others_may_write_to_gets_no_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys.toml"
    file.touch()
    file.chmod(0o666)
    assert main(["keys", "new", "alice", "--file", str(file)]) == 2
    assert "other users may write to it" in capsys.readouterr().err
    assert file.read_text() == ""


def test_keys_that_are_made_at_once_are_all_stored(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    makers = [
        threading.Thread(target=main, args=(["keys", "new", f"key{i}", "--file", str(file)],))
        for i in range(8)
    ]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    assert {key.name for key in parse_keys(file.read_text()).values()} == {f"key{i}" for i in range(8)}
