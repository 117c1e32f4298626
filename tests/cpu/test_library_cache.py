"""Libraries that are made once: when they are made, when they are opened, and which folder is trusted."""

import errno
import fcntl
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from outrider.cpu.library_cache import MAX_UNUSED_S, Recipe, Unusable, failure_of, load_cached
from outrider.files.atomic import TEMPORARY
from patience import PATIENCE_S

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux only: macOS has Accelerate")


class Library:
    """Counts how often it is made, and is read where others are opened."""

    def __init__(self) -> None:
        self.times_made = 0
        self.read_from: list[Path] = []

    def make(self, path: Path) -> None:
        self.times_made += 1
        path.write_bytes(b"a library")

    def read(self, path: str) -> bytes:
        self.read_from.append(Path(path))
        return Path(path).read_bytes()

    def load(self, read: Callable[[str], bytes] | None = None) -> bool:
        """Whether it is kept."""
        content, is_kept = load_cached(Recipe("lib", self.make), read or self.read)
        assert content == b"a library"
        return is_kept


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("OUTRIDER_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "outrider" / "blas"
    folder.mkdir(mode=0o700, parents=True)
    return folder


@pytest.fixture
def library() -> Library:
    return Library()


def test_it_is_made_once_and_kept(folder: Path, library: Library) -> None:
    assert library.load()
    assert library.load()
    (kept,) = folder.iterdir()
    assert library.read_from == [kept, kept]
    assert library.times_made == 1


def test_one_whose_name_goes_on_serves_as_well(folder: Path, library: Library) -> None:
    load_cached(Recipe("lib-of-one", library.make), library.read)
    load_cached(Recipe("lib", library.make), library.read)
    assert library.times_made == 1
    load_cached(Recipe("lib-of-another", library.make), library.read)
    assert library.times_made == 2


def test_a_folder_is_made_for_nobody_else(folder: Path, library: Library) -> None:
    folder.rmdir()
    assert library.load()
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("damage", [b"", b"a lib", b"A library"])
def test_a_damaged_one_is_not_opened_but_made_anew(damage: bytes, folder: Path, library: Library) -> None:
    library.load()
    (kept,) = folder.iterdir()
    kept.write_bytes(damage)
    assert library.load()
    assert library.times_made == 2
    assert kept.read_bytes() == b"a library"


def test_one_that_cannot_be_opened_is_made_anew_once(folder: Path, library: Library) -> None:
    library.load()

    def refuse(path: str) -> bytes:
        raise OSError(f"{path}: of another system")

    with pytest.raises(OSError, match="of another system"):
        library.load(refuse)
    assert library.times_made == 2


def test_a_verdict_on_an_intact_one_stands(folder: Path, library: Library) -> None:
    def refuse(path: str) -> bytes:
        raise Unusable("not for this CPU")

    for _ in range(2):
        with pytest.raises(Unusable, match="not for this CPU"):
            library.load(refuse)
    assert library.times_made == 1


def open_to_the_group(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.chmod(0o770)


def open_to_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.chmod(0o707)


def somebody_elses(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.getuid() == 0:
        os.chown(folder, 12345, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: 12345)


def mounted_noexec(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _path: SimpleNamespace(f_flag=os.ST_NOEXEC))


def full_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for kept in folder.iterdir():
        kept.unlink()
    monkeypatch.setattr(os, "fsync", fsync)


def no_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (open_to_the_group, "others may write"),
        (open_to_all, "others may write"),
        (somebody_elses, "another user"),
        (mounted_noexec, "noexec"),
        (full_disk, "No space left"),
        (no_home, "home"),
    ],
)
def test_without_a_folder_to_trust_it_is_made_once_for_this_process(
    spoil: Callable[[Path, pytest.MonkeyPatch], None],
    complaint: str,
    folder: Path,
    library: Library,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    library.load()  # a good one lies there
    spoil(folder, monkeypatch)
    with caplog.at_level(logging.WARNING, "outrider.cpu.blas"):
        assert not library.load()
    assert library.times_made == 2
    assert folder not in library.read_from[-1].parents
    assert not library.read_from[-1].exists()
    assert [complaint in record.getMessage() for record in caplog.records] == [True]
    assert list(folder.glob(f"{TEMPORARY}*")) == []


def test_files_that_killed_processes_left_are_removed(folder: Path, library: Library) -> None:
    abandoned, in_use = folder / f"{TEMPORARY}abandoned", folder / f"{TEMPORARY}in-use"
    abandoned.touch()
    with open(in_use, "xb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        library.load()
    assert not abandoned.exists()
    assert in_use.exists()


def test_libraries_that_were_long_not_used_are_removed(folder: Path, library: Library) -> None:
    library.load()
    (used,) = folder.iterdir()
    old = time.time() - MAX_UNUSED_S - 60
    unused = folder / "lib-of-an-earlier-version.so"
    unused.touch()
    for file in (used, unused):
        os.utime(file, (old, old))
    library.load()
    load_cached(Recipe("other", library.make), library.read)
    assert used.exists()
    assert not unused.exists()


def test_a_program_that_takes_too_long_is_ended() -> None:
    with pytest.raises(Unusable, match=r"sh took longer than 0\.3 s"):
        # Either would keep our end of the pipe waiting.
        failure_of(["sh", "-c", "sleep 900 & sleep 900"], timeout_s=0.3)


def test_a_programs_failure_is_told(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/nowhere/sh\n")
    broken.chmod(0o755)
    assert failure_of(["true"]) == ""
    assert failure_of(["sh", "-c", "echo no >&2; exit 3"]) == "failed (3): no"
    assert failure_of([str(broken)]).startswith("cannot be run: ")


def test_a_program_has_nothing_to_read_and_no_terminal() -> None:
    """One that asks a question gets no answer instead of waiting for it."""
    code = """
import sys
from outrider.cpu.library_cache import failure_of
sys.exit(failure_of(["sh", "-c", "read answer && exit 1; exit 0"]) != "")
"""
    subprocess.run([sys.executable, "-c", code], input=b"yes\n", check=True, timeout=PATIENCE_S)
