"""Cells that need no model: the memory's bandwidth, and what must hold on this device."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.gpu import checks
from benchmarks.gpu.bare import measure_bandwidth
from benchmarks.gpu.settings import Found, Settings, say


class Machine:
    """The bandwidth is measured once, when first asked for."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._bandwidth: dict[str, float] | None = None

    def cells(self) -> dict[str, Callable[[], Found]]:
        return {
            "bandwidth": self.bandwidth,
            "checks/window": self.window,
            "checks/layer": self.layer,
            "checks/exact": self.exact,
        }

    def bandwidth(self) -> Found:
        if self._bandwidth is None:
            self._bandwidth = measure_bandwidth(self._settings.bandwidth_bytes)
            told = ", ".join(f"{name} {rate / 1e12:.3f} TB/s" for name, rate in self._bandwidth.items())
            say(f"bandwidth  {told}")
        return dict(self._bandwidth)

    @property
    def bytes_per_s(self) -> float:
        return max(self.bandwidth().values())

    def window(self) -> Found:
        found = checks.window_kernels()
        say(f"delta-rule kernels  {found}")
        return found

    def layer(self) -> Found:
        found = checks.fused_layers()
        say(f"delta-rule layers  {found}")
        return found

    def exact(self) -> Found:
        found = checks.exactness()
        for name, result in found["results"].items():
            say(f"drafts leave tokens as they are  {name}: {result}")
        return found
