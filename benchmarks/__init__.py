"""Benchmarks of the step: ratios of runs that take turns in one process."""

import outrider  # noqa: F401  (first: it loads the fast BLAS, which must be loaded before mlx)
