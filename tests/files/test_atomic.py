"""A file is there whole or not at all, whatever happens to its writer."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outrider.files import atomic
from outrider.files.atomic import TEMPORARY, atomic_file, remove_if_abandoned, write_text


def test_the_old_file_is_there_until_the_new_one_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_text(path, "old")
    with atomic_file(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
def test_a_writer_that_raises_leaves_the_old_file(tmp_path: Path, error: BaseException) -> None:
    write_text(tmp_path / "file", "old")

    def write() -> None:
        with atomic_file(tmp_path / "file") as file:
            file.write(b"new")
            raise error

    with pytest.raises(type(error)):
        write()
    assert os.listdir(tmp_path) == ["file"]
    assert (tmp_path / "file").read_text() == "old"


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(tmp_path / "file", "old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_text(tmp_path / "file", "new")
    assert os.listdir(tmp_path) == ["file"]
    assert (tmp_path / "file").read_text() == "old"


def test_the_file_has_the_permissions_that_the_user_wants(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "file", "x")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


WRITER = """
import sys
from pathlib import Path
from outrider.files.atomic import atomic_file
with atomic_file(Path(sys.argv[1])) as file:
    file.write(b"half")
    file.flush()
    print("writing", flush=True)
    sys.stdin.read()
"""


def test_a_file_is_removed_once_its_writer_was_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path / "file")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"writing\n"
        (temporary,) = tmp_path.iterdir()
        assert temporary.name.startswith(TEMPORARY)
        assert not remove_if_abandoned(temporary)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    assert remove_if_abandoned(temporary)
    assert list(tmp_path.iterdir()) == []
    assert not remove_if_abandoned(temporary)


def test_a_file_that_is_taken_for_abandoned_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process looks for abandoned files right between a file's creation and its lock."""
    lock = atomic.fcntl.flock

    def late_lock(file: Any, operation: int) -> None:
        monkeypatch.setattr(atomic.fcntl, "flock", lock)
        (unlocked,) = tmp_path.iterdir()
        assert remove_if_abandoned(unlocked)
        lock(file, operation)

    monkeypatch.setattr(atomic.fcntl, "flock", late_lock)
    write_text(tmp_path / "file", "whole")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["whole"]
