import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.models.errors import ModelUnavailable
from outrider.models.files import folders


def entries(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if entry.suffix != ".lock")


def test_a_folder_is_built_once(tmp_path):
    calls = []

    def build(work):
        calls.append(work)
        (work / "file").write_text("x")

    for _ in range(2):
        assert folders.build_once(tmp_path / "models" / "a", build) == tmp_path / "models" / "a"
    assert len(calls) == 1
    assert entries(tmp_path / "models") == ["a"]
    assert (tmp_path / "models" / "a" / "file").read_text() == "x"


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
def test_a_failed_or_interrupted_build_leaves_nothing(tmp_path, error):
    def build(work):
        (work / "file").write_text("x")
        raise error

    with pytest.raises(type(error)):
        folders.build_once(tmp_path / "a", build)
    assert entries(tmp_path) == []


def test_an_unusable_folder_is_replaced_as_a_whole(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "old").write_text("old")
    folders.build_once(
        tmp_path / "a",
        lambda work: (work / "new").write_text("new"),
        lambda folder: (folder / "new").exists(),
    )
    assert entries(tmp_path) == ["a"]
    assert entries(tmp_path / "a") == ["new"]


def test_the_old_folder_stays_when_its_replacement_fails(tmp_path):
    (tmp_path / "a").mkdir()

    def build(work):
        raise RuntimeError

    with pytest.raises(RuntimeError):
        folders.build_once(tmp_path / "a", build, lambda folder: False)
    assert entries(tmp_path) == ["a"]


KILLED = """
import os, signal, sys
from pathlib import Path
from outrider.models.files import folders
def build(work):
    (work / "file").write_bytes(bytes(1000))
    os.kill(os.getpid(), signal.SIGKILL)
folders.build_once(Path(sys.argv[1]) / "a", build)
"""


def test_leftovers_of_a_killed_process_are_removed_by_the_next(tmp_path):
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert len(entries(tmp_path)) == 1
    assert "part" in entries(tmp_path)[0]
    folders.build_once(tmp_path / "a", lambda work: (work / "file").write_text("x"))
    assert entries(tmp_path) == ["a"]


RACING = """
import sys, time
from pathlib import Path
from outrider.models.files import folders
root = Path(sys.argv[1])
def build(work):
    with open(root / "builds", "a") as log:
        log.write("built\\n")
    time.sleep(0.3)
    (work / "file").write_text("x")
print((folders.build_once(root / "a", build) / "file").read_text())
"""


def test_of_several_processes_one_builds_and_all_succeed(tmp_path):
    command = [sys.executable, "-c", RACING, str(tmp_path)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert [process.communicate()[0].strip() for process in processes] == ["x"] * 4
    assert (tmp_path / "builds").read_text() == "built\n"
    assert entries(tmp_path) == ["a", "builds"]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (errno.ENOSPC, "is full. Free some space, or set OUTRIDER_CACHE"),
        (errno.EDQUOT, "is full"),
        (errno.EACCES, "cannot be written to"),
        (errno.EROFS, "cannot be written to"),
        (errno.EIO, "Cannot store a model in"),
    ],
)
def test_storage_errors_say_what_to_do_and_leave_nothing(tmp_path, code, message):
    def build(work):
        (work / "half").write_text("x")
        raise OSError(code, os.strerror(code))

    with pytest.raises(ModelUnavailable, match=message):
        folders.build_once(tmp_path / "a", build)
    assert entries(tmp_path) == []


def test_a_place_that_cannot_be_made_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ModelUnavailable, match="OUTRIDER_CACHE"):
        folders.build_once(tmp_path / "file" / "models" / "a", lambda work: None)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_cache_is_a_clear_error_unless_the_model_is_there(tmp_path):
    folders.build_once(tmp_path / "a", lambda work: None)
    tmp_path.chmod(0o500)
    try:
        assert folders.build_once(tmp_path / "a", lambda work: None) == tmp_path / "a"
        with pytest.raises(ModelUnavailable, match="cannot be written to"):
            folders.build_once(tmp_path / "b", lambda work: None)
    finally:
        tmp_path.chmod(0o700)
