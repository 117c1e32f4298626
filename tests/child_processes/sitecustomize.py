"""Runs in every Python process that a test starts: what steps cost is measured in a moment there too.

tests/conftest.py puts this folder into PYTHONPATH, and the folder in which costs are stored into
COSTS_OF_TESTS: the costs of a server under test must not become those of the user's servers. Nothing of
Outrider is imported before the program imports it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

BUDGET_S = 0.05  # of measuring what steps cost


def _change(module: ModuleType) -> None:
    if module.__name__ == "outrider.speculate.calibration":
        module.BUDGET_S = BUDGET_S  # type: ignore[attr-defined]
    else:
        module.folder = lambda: Path(os.environ["COSTS_OF_TESTS"])  # type: ignore[attr-defined]


class _Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        _change(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in ("outrider.speculate.calibration", "outrider.speculate.cost_store"):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(name, spec.origin)
        return spec


if "COSTS_OF_TESTS" in os.environ:
    sys.meta_path.insert(0, _Finder())
