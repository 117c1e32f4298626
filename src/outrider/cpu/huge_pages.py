"""Weights in huge pages. With one row, a tenth of a step went into looking up addresses in small pages."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import mlx.core as mx

from outrider.cpu import extension

log = logging.getLogger(__name__)


def use_huge_pages(weights: Sequence[mx.array]) -> None:
    """Move weights that do not change any more into huge pages, if there are any (Linux 6.1 and later)."""
    native = extension.if_loaded()
    if native is None:
        return
    mx.eval(weights)
    num_bytes = native.use_huge_pages(weights)
    log.debug("%d MB of weights are in huge pages", num_bytes >> 20)
