"""The one exception that says "this model cannot be had", for every reason a user can meet."""


class ModelUnavailable(Exception):
    """A model cannot be fetched, read or stored. The message says what happened and what to do about it."""


class UnreadableGGUF(ModelUnavailable):
    """A GGUF file that is damaged, or that holds something Outrider does not convert."""
