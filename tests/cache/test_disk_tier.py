"""The disk tier and its folder: bounded, shared, and never in the way, whatever happens to the disk."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cache.host_blocks import block, is_same
from outrider.cache import block_file, block_folder, disk_tier
from outrider.cache.block_file import Arrays
from outrider.cache.block_folder import HEADER_BYTES, BlockFolder
from outrider.cache.disk_tier import DiskTier
from outrider.files import atomic
from patience import PATIENCE_S

PLENTY = 100 << 20
MODEL = "0123abcd"


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    tier = DiskTier(BlockFolder(tmp_path, MODEL, PLENTY))
    yield tier
    tier.close()


def _fetch(tier: DiskTier, name: str) -> Arrays | None:
    tier.fetch(name)
    give_up_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up_s:
        tier.wait_for_fetched(1)
        for fetched in tier.take_fetched():
            assert fetched.name == name
            return fetched.arrays
    raise AssertionError("nothing came")


def test_reading_now_waits_for_the_blocks_that_are_still_written(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = tier.folder.write

    def slowly(name: str, arrays: Arrays) -> bool:
        time.sleep(0.05)
        return write(name, arrays)

    monkeypatch.setattr(tier.folder, "write", slowly)
    assert tier.write("late", block(1))
    found = tier.read_now(["late", "missing"], PATIENCE_S)
    assert found.keys() == {"late", "missing"}
    assert found["late"] is not None
    assert is_same(found["late"], block(1))
    assert found["missing"] is None


def test_a_removed_file_is_gone_and_can_be_written_again(tier: DiskTier) -> None:
    _keep(tier, "one", block(1))
    tier.remove("one")
    assert tier.flush()
    assert not tier.has("one")
    _keep(tier, "one", block(2))
    assert tier.has("one")


def _keep(tier: DiskTier, name: str, arrays: Arrays) -> None:
    assert tier.write(name, arrays)
    assert tier.flush()


def _files(tmp_path: Path) -> list[Path]:
    """All files but the key of the checksums."""
    return [path for path in tmp_path.iterdir() if path.name != block_folder.KEY_FILE]


def _size(tmp_path: Path) -> int:
    return sum(path.stat().st_size for path in _files(tmp_path))


def test_a_block_is_found_again_after_a_restart(tmp_path: Path, tier: DiskTier) -> None:
    _keep(tier, "aa", block(1))
    tier.close()
    later = DiskTier(BlockFolder(tmp_path, MODEL, PLENTY))
    assert later.has("aa")
    assert not later.has("bb")
    assert is_same(_fetch(later, "aa"), block(1))
    assert later.folder.num_bytes == _size(tmp_path)
    later.close()


def test_another_models_file_is_not_found(tmp_path: Path, tier: DiskTier) -> None:
    _keep(tier, "aa", block(1))
    other = BlockFolder(tmp_path, "ffff", PLENTY)
    assert not other.has("aa")
    with pytest.raises(FileNotFoundError):
        other.read("aa")


def test_a_renamed_file_is_removed_and_not_served(tmp_path: Path, tier: DiskTier, caplog) -> None:
    _keep(tier, "aa", block(1))
    tier.folder.path("aa").rename(tier.folder.path("bb"))
    assert _fetch(tier, "bb") is None
    assert _files(tmp_path) == []
    assert "is removed: the file belongs to another name" in caplog.text


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_a_damaged_file_is_removed_and_not_served(tier: DiskTier, damage: str, caplog) -> None:
    _keep(tier, "aa", block(1))
    path = tier.folder.path("aa")
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 4
    path.write_bytes({"cut": whole[:99], "flipped": whole, "empty": b""}[damage])
    assert _fetch(tier, "aa") is None
    assert not path.exists()
    assert not tier.has("aa")
    assert tier.counts.refused == 1
    assert "is removed" in caplog.text
    _keep(tier, "aa", block(1))
    assert is_same(_fetch(tier, "aa"), block(1))


def test_the_least_recently_used_files_go_first(tmp_path: Path) -> None:
    size = len(_written(tmp_path / "size"))
    tier = DiskTier(BlockFolder(tmp_path / "blocks", MODEL, 3 * size + HEADER_BYTES))
    for i in range(3):
        _keep(tier, f"a{i}", block(i))
    _fetch(tier, "a0")
    _keep(tier, "a3", block(3))
    assert [tier.has(f"a{i}") for i in range(4)] == [True, False, True, True]
    assert tier.folder.num_evicted == 1
    tier.close()
    later = BlockFolder(tmp_path / "blocks", MODEL, 2 * size + 99)
    assert [later.has(f"a{i}") for i in range(4)] == [True, False, False, True], (
        "the order outlives a restart"
    )


def _written(path: Path) -> bytes:
    block_file.write_block_file(path, {"fingerprint": MODEL, "name": "a0"}, block(0), b"key")
    return path.read_bytes()


def test_the_folder_never_holds_more_than_its_budget(tmp_path: Path) -> None:
    budget = 50_000 + HEADER_BYTES
    folder = BlockFolder(tmp_path, MODEL, budget)
    for i in range(60):
        assert folder.write(f"a{i}", block(i, num_cells=1 + 7 * i % 64))
        assert folder.num_bytes == _size(tmp_path) <= budget
    assert not folder.write("huge", block(0, num_cells=10_000))
    assert folder.num_bytes == _size(tmp_path) > 0, "what never fits costs nobody's place"


def test_a_clock_that_goes_backwards_does_not_turn_the_order_around(tmp_path: Path) -> None:
    moments = iter([2e9, 1e9, 5e8, 4e8])
    folder = BlockFolder(tmp_path, MODEL, PLENTY, clock=lambda: next(moments))
    for i in range(4):
        folder.write(f"a{i}", block(i))
    each = _size(tmp_path) // 4
    later = BlockFolder(tmp_path, MODEL, 2 * each + 99, clock=lambda: 3e8)
    assert [later.has(f"a{i}") for i in range(4)] == [False, False, True, True]
    later.write("a9", block(9))
    assert later.num_bytes == _size(tmp_path)


def test_two_servers_share_a_folder(tmp_path: Path, tier: DiskTier) -> None:
    other = DiskTier(BlockFolder(tmp_path, MODEL, PLENTY))
    _keep(tier, "aa", block(1))
    assert other.has("aa")
    assert is_same(_fetch(other, "aa"), block(1))
    other.folder.remove("aa")
    assert _fetch(tier, "aa") is None, "gone under its hands"
    assert not tier.has("aa")
    other.close()


def test_two_servers_that_write_at_once_stay_within_the_bound_and_lose_nothing(tmp_path: Path) -> None:
    size = len(_written(tmp_path / "size"))
    budget = 8 * size + HEADER_BYTES
    tiers = [DiskTier(BlockFolder(tmp_path / "blocks", MODEL, budget)) for _ in range(2)]
    for i in range(120):
        assert tiers[i % 2].write(f"a{i % 40}", block(i % 40))
        if i % 10 == 0:
            name = f"a{i % 40}"
            found = _fetch(tiers[(i + 1) % 2], name)
            assert found is None or is_same(found, block(i % 40))
    for tier in tiers:
        assert tier.flush()
        assert tier.counts.failed == 0
    assert _size(tmp_path / "blocks") <= budget + size, "each write looks at the whole of a small folder"
    for tier in tiers:
        tier.close()


def _fill(folder: Path, num_files: int) -> None:
    """Files of another model, oldest first."""
    for i in range(num_files):
        path = folder / f"ffff-{i:x}{block_folder.SUFFIX}"
        path.write_bytes(b"12345")
        os.utime(path, (i, i))


def test_the_cost_of_a_write_does_not_grow_with_the_number_of_files(tmp_path: Path, monkeypatch) -> None:
    _fill(tmp_path, 1500)
    folder = BlockFolder(tmp_path, MODEL, PLENTY)
    looked_at = 0
    fullmatch = block_folder.BLOCK_FILE_NAME.fullmatch

    class Counted:
        def fullmatch(self, name: str) -> Any:
            nonlocal looked_at
            looked_at += 1
            return fullmatch(name)

    monkeypatch.setattr(block_folder, "BLOCK_FILE_NAME", Counted())
    for i in range(32):
        before = looked_at
        folder.write(f"a{i}", block(i))
        assert looked_at - before <= block_folder.ENTRIES_PER_WRITE
    assert looked_at > 1000, "and the whole folder is looked at in turn"
    folder.close()


def test_other_servers_changes_are_noticed_within_a_few_writes(tmp_path: Path) -> None:
    _fill(tmp_path, 300)
    folder, other = (BlockFolder(tmp_path, MODEL, PLENTY) for _ in range(2))
    for i in range(20):
        other.write(f"b{i}", block(i))
    other.remove_all()
    for i in range(20):
        other.write(f"c{i}", block(i))
    for path in sorted(tmp_path.glob("ffff-*"))[:100]:
        path.unlink()
    for i in range(2 * 300 // block_folder.ENTRIES_PER_WRITE + 2):
        folder.write(f"a{i}", block(i))
    assert folder.num_bytes == _size(tmp_path)
    folder.close()


def test_a_file_that_another_server_uses_is_not_removed_as_the_oldest(tmp_path: Path) -> None:
    size = len(_written(tmp_path / "size"))
    folder = BlockFolder(tmp_path / "blocks", MODEL, 3 * size + HEADER_BYTES)
    for i in range(3):
        folder.write(f"a{i}", block(i))
    other = BlockFolder(tmp_path / "blocks", MODEL, PLENTY)
    other.read("a0")
    folder.write("a3", block(3))
    assert [folder.has(f"a{i}") for i in range(4)] == [True, False, True, True]


def test_the_number_of_files_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fill(tmp_path, 20)
    monkeypatch.setattr(block_folder, "MAX_FILES", 10)
    folder = BlockFolder(tmp_path, MODEL, PLENTY)
    for i in range(15):
        folder.write(f"a{i}", block(i))
        assert len(_files(tmp_path)) <= 10
    assert folder.has("a14")
    assert folder.num_bytes == _size(tmp_path)


def test_files_that_come_and_go_leave_nothing_in_memory(tmp_path: Path) -> None:
    """Another server with a smaller limit removes them: this one never has to."""
    folder = BlockFolder(tmp_path, MODEL, PLENTY)
    for i in range(300):
        folder.write(f"a{i}", block(0))
        folder.path(f"a{i}").unlink()
    assert len(folder._by_use) < 200


def test_a_full_disk_stops_writing_for_a_while_and_says_so(
    tmp_path: Path, tier: DiskTier, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert tier.write("aa", block(1))
    assert tier.flush()
    assert not tier.write("bb", block(2)), "not tried again at once"
    assert tier.counts.failed == tier.counts.skipped == 1
    assert "No space left on device" in caplog.text
    assert _files(tmp_path) == []
    monkeypatch.undo()
    monkeypatch.setattr(disk_tier.time, "monotonic", lambda: time.perf_counter() + 1e9)
    assert tier.write("bb", block(2)), "but later"


def test_a_read_only_folder_is_read(
    tmp_path: Path, tier: DiskTier, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    _keep(tier, "aa", block(1))

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "touch", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    monkeypatch.setattr(os, "utime", refuse)
    reader = DiskTier(BlockFolder(tmp_path, MODEL, 1))
    assert "is read-only" in caplog.text
    assert is_same(_fetch(reader, "aa"), block(1)), "not even a tight budget removes anything"
    assert not reader.write("bb", block(2))
    reader.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_write_permission_is_read(tmp_path: Path, tier: DiskTier) -> None:
    _keep(tier, "aa", block(1))
    tmp_path.chmod(0o500)
    try:
        reader = DiskTier(BlockFolder(tmp_path, MODEL, PLENTY))
        assert is_same(_fetch(reader, "aa"), block(1))
        assert not reader.write("bb", block(2))
        reader.close()
    finally:
        tmp_path.chmod(0o700)


def test_a_file_in_the_folders_place_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("mine")
    with pytest.raises(OSError):  # noqa: PT011
        BlockFolder(tmp_path / "x", MODEL, PLENTY)


def test_other_files_in_the_folder_are_never_touched(tmp_path: Path) -> None:
    mine = [tmp_path / name for name in ("model.safetensors", "notes.txt", "x.block.safetensors")]
    for path in mine:
        path.write_bytes(b"mine" * 1000)
    folder = BlockFolder(tmp_path, MODEL, 1)
    folder.remove_all()
    assert all(path.exists() for path in mine)
    assert folder.num_bytes == 0


def test_clear_removes_this_models_files_and_what_was_queued(tmp_path: Path, tier: DiskTier) -> None:
    BlockFolder(tmp_path, "ffff", PLENTY).write("aa", block(1))
    for i in range(20):
        tier.write(f"a{i}", block(i))
    tier.clear()
    assert tier.flush()
    assert [path.name for path in _files(tmp_path)] == ["ffff-aa.block.safetensors"]
    _keep(tier, "bb", block(1))
    assert is_same(_fetch(tier, "bb"), block(1))


def test_too_much_at_once_is_not_written_and_nobody_waits(tmp_path: Path) -> None:
    tier = DiskTier(BlockFolder(tmp_path, MODEL, PLENTY), queue_bytes=10_000)
    written = [tier.write(f"a{i}", block(i, num_cells=64)) for i in range(200)]
    assert any(written)
    assert not all(written)
    assert tier.flush()
    assert tier.counts.written + tier.counts.skipped == 200
    tier.close()


def test_a_block_with_nan_is_not_written(tier: DiskTier, caplog) -> None:
    bad = dict(block(1))
    bad["0"].data[0, 0, 0, 0] = float("nan")
    _keep(tier, "aa", bad)
    assert not tier.has("aa")
    assert "NaN" in caplog.text


def test_a_closed_tier_writes_nothing_more(tier: DiskTier) -> None:
    tier.close()
    assert not tier.write("aa", block(1))


WRITER = """
import sys
from pathlib import Path
from outrider.cache.block_folder import BlockFolder
from outrider.cache.disk_tier import DiskTier
from cache.host_blocks import block
tier = DiskTier(BlockFolder(Path(sys.argv[1]), sys.argv[2], 1 << 30))
big = block(1, num_cells=60_000)
print("ready", flush=True)
for i in range(1_000_000):
    tier.write(f"a{i}", big)
    tier.flush()
"""


def test_a_server_killed_in_mid_write_leaves_nothing_that_is_served(tmp_path: Path, caplog) -> None:
    """A real SIGKILL, several times, at moments when a file is half written."""
    caplog.set_level(logging.WARNING)
    caught = 0
    for _ in range(6):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), MODEL],
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        _stop_in_mid_write(process, tmp_path)
        process.send_signal(signal.SIGKILL)
        process.wait()
        caught += len(_half_written(tmp_path))
        tier = DiskTier(BlockFolder(tmp_path, MODEL, 1 << 30))
        assert _half_written(tmp_path) == [], "cleaned up"
        whole = block(1, num_cells=60_000)
        for path in _files(tmp_path):
            name = path.name.removeprefix(f"{MODEL}-").removesuffix(block_folder.SUFFIX)
            assert is_same(_fetch(tier, name), whole)
        assert tier.folder.num_bytes == _size(tmp_path)
        tier.close()
        if caught >= 2:
            break
        for path in _files(tmp_path):
            path.unlink()
    assert caught, "no write was caught half-way"


def _half_written(tmp_path: Path) -> list[Path]:
    return [path for path in tmp_path.iterdir() if path.name.startswith(atomic.TEMPORARY)]


def _stop_in_mid_write(process: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """The process stands still while a file is half written. A write that ended too soon is let go."""
    give_up_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up_s:
        if not any(len(path.name) > 40 for path in _half_written(tmp_path)):
            continue
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        if _half_written(tmp_path):
            return
        process.send_signal(signal.SIGCONT)
    raise AssertionError("nothing was written")


def test_a_file_that_is_being_written_is_not_cleaned_up(tmp_path: Path) -> None:
    import fcntl

    path = tmp_path / f"{atomic.TEMPORARY}abc"
    with open(path, "xb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        BlockFolder(tmp_path, MODEL, PLENTY)
        assert path.exists()
    BlockFolder(tmp_path, MODEL, PLENTY)
    assert not path.exists()


# -- other users -----------------------------------------------------------------------------------------


def test_a_new_folder_and_its_key_are_for_their_owner_alone(tmp_path: Path) -> None:
    folder = BlockFolder(tmp_path / "new" / "blocks", MODEL, PLENTY).folder
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / block_folder.KEY_FILE).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", [0o777, 0o720, 0o1777])
def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(PermissionError, match=r"other users may write to it.*chmod go-w"):
        BlockFolder(tmp_path, MODEL, PLENTY)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = tmp_path.stat().st_uid
    if owner == 0:
        os.chown(tmp_path, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(PermissionError, match="belongs to another user"):
        BlockFolder(tmp_path, MODEL, PLENTY)


def test_a_folder_that_others_may_read_is_used_with_a_warning(tmp_path: Path, caplog) -> None:
    tmp_path.chmod(0o755)
    BlockFolder(tmp_path, MODEL, PLENTY)
    assert "chmod 700" in caplog.text


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_key_that_others_may_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    BlockFolder(tmp_path, MODEL, PLENTY)
    (tmp_path / block_folder.KEY_FILE).chmod(mode)
    with pytest.raises(PermissionError, match="other users may"):
        BlockFolder(tmp_path, MODEL, PLENTY)


def test_a_key_that_is_a_link_or_damaged_is_refused(tmp_path: Path) -> None:
    key = tmp_path / block_folder.KEY_FILE
    (tmp_path / "elsewhere").touch(mode=0o600)
    key.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic link"):
        BlockFolder(tmp_path, MODEL, PLENTY)
    key.unlink()
    key.touch(mode=0o600)
    key.write_bytes(b"short")
    with pytest.raises(OSError, match="is damaged: remove this file"):
        BlockFolder(tmp_path, MODEL, PLENTY)


def test_a_planted_block_is_removed_and_not_served(tmp_path: Path, tier: DiskTier, caplog) -> None:
    """The block is right in every other way: an attacker knows the format, the model and the prompt."""
    attacker = BlockFolder(tmp_path / "attacker", MODEL, PLENTY)
    attacker.write("aa", block(7))
    attacker.path("aa").rename(tier.folder.path("aa"))
    assert tier.has("aa")
    assert _fetch(tier, "aa") is None
    assert not tier.has("aa")
    assert "the checksum is wrong" in caplog.text


def test_a_link_in_the_folder_is_no_block(tmp_path: Path, tier: DiskTier) -> None:
    _keep(tier, "aa", block(1))
    tier.folder.path("bb").symlink_to(tier.folder.path("aa"))
    assert not tier.has("bb")
    assert not BlockFolder(tmp_path, MODEL, PLENTY).has("bb")


def test_a_full_disk_at_the_start_gives_a_key_for_this_run(tmp_path: Path, monkeypatch, caplog) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        folder = BlockFolder(tmp_path, MODEL, PLENTY)
    assert "blocks of other runs are not used" in caplog.text
    folder.write("aa", block(1))
    assert is_same(folder.read("aa"), block(1))
