"""Figures of a running prefix cache, for any thread."""

from __future__ import annotations

from outrider.engine.prefix.cache import PrefixCache


class PrefixStatus:
    """Each figure is read by itself: two figures may belong to different moments."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._tier = None if cache.disk is None else cache.disk.tier

    def gauges(self) -> dict[str, int]:
        """What the cache holds now."""
        index = self._cache.index
        found = {"bytes": index.num_bytes, "budget_bytes": index.budget_bytes, "blocks": index.num_blocks}
        if self._tier is not None:
            found["disk_bytes"] = self._tier.folder.num_bytes
        return found

    def counts(self) -> dict[str, int]:
        """What the cache has done since the start."""
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
