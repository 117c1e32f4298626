"""Benchmarks: ratios measured side by side in one run."""

import outrider  # noqa: F401  (first: it loads the fast BLAS, which must come before mlx)
