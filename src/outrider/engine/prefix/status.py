"""How the engine's prefix cache is made, and what may be read of it on any thread."""

from __future__ import annotations

from outrider.cache.disk_tier import DiskTier
from outrider.cache.prefix_index import PrefixIndex
from outrider.config import CacheGeometry
from outrider.engine.prefix.cache import PrefixCache
from outrider.engine.prefix.disk import BlockDisk


def new_prefix_cache(geometry: CacheGeometry, budget_bytes: int, tier: DiskTier | None) -> PrefixCache:
    per_cell, per_state = geometry.bytes_per_cell, geometry.bytes_per_slot
    index = PrefixIndex(budget_bytes, per_cell, per_state)
    disk = None if tier is None else BlockDisk(tier, index)
    return PrefixCache(index, per_cell, has_states=per_state > 0, disk=disk)


class PrefixStatus:
    """Numbers of a running prefix cache. Each is read by itself: two may be of different moments."""

    def __init__(self, cache: PrefixCache, tier: DiskTier | None) -> None:
        self._cache = cache
        self._tier = tier

    def gauges(self) -> dict[str, int]:
        """What it holds now."""
        index = self._cache.index
        found = {"bytes": index.num_bytes, "budget_bytes": index.budget_bytes, "blocks": index.num_blocks}
        if self._tier is not None:
            found["disk_bytes"] = self._tier.folder.num_bytes
        return found

    def counts(self) -> dict[str, int]:
        """What it has done so far."""
        found = {"hit_tokens": self._cache.num_hit_cells, "evictions": self._cache.index.num_evicted}
        if self._tier is not None:
            counts = self._tier.counts
            found |= {
                "disk_reads": counts.read,
                "disk_writes": counts.written,
                "disk_evictions": self._tier.folder.num_evicted,
                "disk_refused": counts.refused,
                "disk_failures": counts.failed,
                "disk_skipped": counts.skipped,
            }
        return found
