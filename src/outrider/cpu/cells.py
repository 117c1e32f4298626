"""Cells of rows: written and copied by one native operation each."""

from __future__ import annotations

import mlx.core as mx

from outrider.cache.prefix_store import CopyCells
from outrider.cache.ragged_kv import WriteCells
from outrider.cpu import extension


def native_copy_cells() -> CopyCells | None:
    """Copies cells out of rows' blocks, for cached prefixes: a memcpy for each layer and head. None without
    the native extension.

    With MLX's operations copies took 6 % of a burst of 8 rows of the default model; no row decodes meanwhile.
    """
    native = extension.if_loaded()
    return None if native is None else native.copy_cells


def native_write_cells() -> WriteCells | None:
    """Writes keys and values, where MLX takes some fifteen operations. None without the native extension, and
    where the cells are on a GPU."""
    native = extension.if_loaded()
    is_on_cpu = mx.default_device() == mx.Device(mx.cpu)
    return native.write_cells if native is not None and is_on_cpu else None
