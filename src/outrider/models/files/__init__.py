"""Model files: the cache, downloads, conversions, and the models that ship with Outrider or have a name."""
