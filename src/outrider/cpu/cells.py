"""Cells of rows: written and copied by one native operation each."""

from __future__ import annotations

from outrider.cache.prefix_store import CopyCells
from outrider.cache.ragged_kv import WriteCells
from outrider.cpu import extension


def native_copy_cells() -> CopyCells | None:
    """Copies cells out of rows' blocks, for cached prefixes. None without the native extension.

    It takes a memcpy for each layer and head. With MLX's operations copies took 6 % of a burst of 8 rows of
    the default model; no row decodes meanwhile.
    """
    native = extension.if_loaded()
    return None if native is None else native.copy_cells


def native_write_cells() -> WriteCells | None:
    """Writes keys and values, for which MLX takes some forty operations. None without the extension."""
    native = extension.if_loaded()
    return None if native is None else native.write_cells
