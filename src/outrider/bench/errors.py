"""The error that ends a benchmark."""

from __future__ import annotations


class BenchFailed(RuntimeError):
    """Nothing can be measured. The message gives the reason and what to do."""
