"""The exception that says "this head cannot be used", for every reason a user can meet."""

from outrider.models.errors import ModelUnavailable


class HeadError(ModelUnavailable):
    """A head cannot be used with this model; the message names the tensor and the remedy."""


class UnknownHead(HeadError):
    """A head of a kind that is not known for this model's family, though it may well be its own."""
