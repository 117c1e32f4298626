"""The memory limit of the container: Linux control groups, version 1 and 2. Pure: reads files, no MLX."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

UNLIMITED = 1 << 60  # version 1 writes a number near 2^63 where version 2 writes "max"


def free_bytes(processes: Path = Path("/proc"), mount: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Memory that this process may still take before its container's limit; None: there is no limit.

    A limit of any parent group counts too. Cached file pages that the kernel can drop count as free.
    """
    try:
        groups = (processes / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return None
    free = [left for folder in _folders(groups, mount) if (left := _left_in(folder)) is not None]
    return min(free, default=None)


def _folders(groups: list[str], mount: Path) -> Iterator[Path]:
    """The process's group and its parents. Inside of a container, only the mount itself may be visible."""
    for line in groups:  # hierarchy:controllers:path; the controllers of version 2 are empty
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root = mount
        elif "memory" in controllers.split(","):
            root = mount / "memory"
        else:
            continue
        group = root / path.lstrip("/")
        yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(root))


def _left_in(folder: Path) -> int | None:
    limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
    used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes")
    if limit is None or limit >= UNLIMITED or used is None:
        return None
    return max(0, limit - max(0, used - _droppable(folder)))


def _droppable(folder: Path) -> int:
    """Bytes of file pages that were not used lately, such as a model file that has been read."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    counts = dict(line.split(maxsplit=1) for line in lines)
    return int(counts.get("total_inactive_file", counts.get("inactive_file", 0)))


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
