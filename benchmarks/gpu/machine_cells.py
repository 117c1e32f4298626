"""Cells that need no model: the memory's bandwidth, and checks of this device."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.gpu import checks
from benchmarks.gpu.bare import measure_bandwidth
from benchmarks.gpu.settings import CellResult, CellSettings, say


class Machine:
    """The bandwidth is measured once, at its first use."""

    def __init__(self, settings: CellSettings) -> None:
        self._settings = settings
        self._bandwidth: dict[str, float] | None = None

    def cells(self) -> dict[str, Callable[[], CellResult]]:
        return {
            "bandwidth": self.bandwidth,
            "checks/window": self.window,
            "checks/layer": self.layer,
            "checks/exact": self.exact,
            "checks/shared-prefixes": self.shared_prefixes,
        }

    def bandwidth(self) -> CellResult:
        if self._bandwidth is None:
            self._bandwidth = measure_bandwidth(self._settings.bandwidth_bytes)
            told = ", ".join(f"{name} {rate / 1e12:.3f} TB/s" for name, rate in self._bandwidth.items())
            say(f"bandwidth  {told}")
        return dict(self._bandwidth)

    @property
    def bytes_per_s(self) -> float:
        return max(self.bandwidth().values())

    def window(self) -> CellResult:
        found = checks.window_kernels()
        say(f"delta-rule kernels  {found}")
        return found

    def layer(self) -> CellResult:
        found = checks.fused_layers()
        say(f"delta-rule layers  {found}")
        return found

    def exact(self) -> CellResult:
        found = checks.exactness()
        for name, result in found["results"].items():
            say(f"tokens with drafts equal to those without  {name}: {result}")
        return found

    def shared_prefixes(self) -> CellResult:
        """Fails if a float32 answer is not what it is without a prefix hit, or if a prefix was not found."""
        found = checks.shared_prefixes(self._settings.is_tiny)
        for name, orders in found["results"].items():
            say(f"rows with and without drafts share prefixes  {name}, cells in {orders['layout']}")
            for order, result in orders.items():
                if order != "layout":
                    say(f"  {order}: {result}")
        if found["wrong"]:
            raise RuntimeError(f"shared prefixes: {'; '.join(found['wrong'])}")
        return found
