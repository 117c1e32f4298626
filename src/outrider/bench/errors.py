"""The error that ends a benchmark."""

from __future__ import annotations


class BenchFailed(RuntimeError):
    """Nothing can be measured. The message says why, and what to do."""
