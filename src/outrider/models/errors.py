"""Exceptions for models that cannot be downloaded, read or served."""


class ModelUnavailable(Exception):
    """A model cannot be downloaded, read, stored or served. The message gives the reason and a remedy."""


class UnreadableGGUF(ModelUnavailable):
    """A GGUF file is damaged, or Outrider cannot convert it."""
