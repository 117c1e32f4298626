"""What stops a benchmark."""

from __future__ import annotations


class BenchFailed(RuntimeError):
    """Nothing can be measured; the message says why and what to do."""
