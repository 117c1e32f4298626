"""Exceptions for heads that cannot be used."""

from outrider.models.errors import ModelUnavailable


class HeadError(ModelUnavailable):
    """A head cannot be used with this model; the message names the tensor and what to do."""


class UnknownHead(HeadError):
    """The head has a layout that is not known for this model's family. It may still belong to the model."""
