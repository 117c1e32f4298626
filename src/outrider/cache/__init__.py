"""Buffers for every row's past, with a length per row. Must not know requests, sampling or scheduling."""
