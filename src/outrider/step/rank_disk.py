"""Cached blocks on the disks of several ranks: each rank stores its own part of a block, under the same name.

Rank 0 decides which blocks are written and read, as on one machine. A block that rank 0 has read is used only
if every other rank can read its part: they are asked before the row that waits for it goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from outrider.cache.block_folder import BlockFolder
from outrider.cache.disk_tier import DiskTier, FetchedFile
from outrider.host_array import HostArray
from outrider.step import step_message
from outrider.step.ranks import Ranks

READ_TIMEOUT_S = 5.0  # for all files of one question; chosen by hand, below the time that a row waits for one


class FirstRankDisk(DiskTier):
    """Rank 0's disk. What it does to files, the other ranks do to their parts."""

    def __init__(self, folder: BlockFolder, ranks: Ranks) -> None:
        super().__init__(folder)
        self._ranks = ranks

    def take_fetched(self) -> list[FetchedFile]:
        """Files that another rank cannot read count as missing. They are removed, and written again later."""
        fetched = super().take_fetched()
        names = [file.name for file in fetched if file.arrays is not None]
        if not names:
            return fetched
        self._ranks.send(step_message.encode_names(names))
        nums_missing = self._ranks.count([False] * len(names))
        missing = {name for name, num in zip(names, nums_missing, strict=True) if num}
        for name in missing:
            self.remove(name)
        return [replace(file, arrays=None) if file.name in missing else file for file in fetched]

    def clear(self) -> None:
        super().clear()
        self._ranks.send([step_message.CLEAR_DISK])


class FollowerDisk:
    """The disk of a rank other than 0."""

    def __init__(self, tier: DiskTier) -> None:
        self.tier = tier
        self._read: dict[str, Mapping[str, HostArray]] = {}  # the files of the last question

    def are_missing(self, names: Sequence[str]) -> list[bool]:
        """Which of these files cannot be read. The others are kept until the next question."""
        found = self.tier.read_now(names, READ_TIMEOUT_S)
        self._read = {name: arrays for name, arrays in found.items() if arrays is not None}
        return [name not in self._read for name in names]

    def read(self, name: str) -> Mapping[str, HostArray]:
        """Raises FileNotFoundError if the file is gone since rank 0 has asked for it."""
        arrays = self._read.pop(name, None) or self.tier.read_now([name], READ_TIMEOUT_S)[name]
        if arrays is None:
            raise FileNotFoundError(f"the cached block {self.tier.folder.path(name)} is gone or damaged")
        return arrays


def answer_question(message: np.ndarray, ranks: Ranks, disk: FollowerDisk | None) -> None:
    """Tell rank 0 which of the files it names cannot be read here."""
    names = step_message.decode_names(message)
    ranks.count([True] * len(names) if disk is None else disk.are_missing(names))
