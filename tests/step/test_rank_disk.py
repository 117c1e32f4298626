"""Blocks on the disks of two ranks: one that a rank lacks is not used by the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache.host_blocks import block, is_same
from outrider.cache.block_folder import BlockFolder
from outrider.cache.disk_tier import DiskTier, FetchedFile
from outrider.step import step_message
from outrider.step.rank_disk import FirstRankDisk, FollowerDisk
from patience import wait_until

PLENTY = 1 << 28


class OtherRank:
    """Stands for the ranks, as rank 0 sees them: another one answers at once."""

    def __init__(self, disk: FollowerDisk) -> None:
        self._disk = disk
        self._message = np.zeros(0, np.int32)

    def send(self, numbers: Sequence[int] | np.ndarray) -> None:
        self._message = np.asarray(numbers, np.int32)
        if self._message[0] == step_message.CLEAR_DISK:
            self._disk.tier.clear()

    def count(self, flags: Sequence[bool]) -> list[int]:
        missing = self._disk.are_missing(step_message.decode_names(self._message))
        return [int(own) + int(other) for own, other in zip(flags, missing, strict=True)]


@pytest.fixture
def other(tmp_path: Path) -> Iterator[FollowerDisk]:
    tier = DiskTier(BlockFolder(tmp_path / "other", "abcd", PLENTY))
    yield FollowerDisk(tier)
    tier.close()


@pytest.fixture
def first(tmp_path: Path, other: FollowerDisk) -> Iterator[FirstRankDisk]:
    ranks: Any = OtherRank(other)
    tier = FirstRankDisk(BlockFolder(tmp_path / "first", "abcd", PLENTY), ranks)
    yield tier
    tier.close()


def fetched(tier: DiskTier, *names: str) -> dict[str, FetchedFile]:
    found: dict[str, FetchedFile] = {}

    def have_come() -> bool:
        found.update({file.name: file for file in tier.take_fetched()})
        return found.keys() == {*names}

    for name in names:
        tier.fetch(name)
    wait_until(have_come)
    return found


def test_a_block_that_another_rank_lacks_counts_as_missing_and_is_removed(
    first: FirstRankDisk, other: FollowerDisk
) -> None:
    for name in ("both", "mine"):
        first.write(name, block(1))
    other.tier.write("both", block(2))
    assert first.flush()
    found = fetched(first, "both", "mine", "none")
    assert is_same(found["both"].arrays, block(1))
    assert found["mine"].arrays is found["none"].arrays is None
    assert is_same(other.read("both"), block(2))
    assert first.flush()
    assert first.has("both")
    assert not first.has("mine"), "it can be written again, on all ranks"


def test_a_block_that_is_lost_after_the_question_is_an_error(
    first: FirstRankDisk, other: FollowerDisk
) -> None:
    with pytest.raises(FileNotFoundError, match="is gone or damaged"):
        other.read("gone")


def test_to_clear_the_first_disk_clears_the_others(first: FirstRankDisk, other: FollowerDisk) -> None:
    for tier in (first, other.tier):
        tier.write("both", block(1))
        assert tier.flush()
    first.clear()
    for tier in (first, other.tier):
        assert tier.flush()
        assert not tier.has("both")
