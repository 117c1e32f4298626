"""What stops a training run, in words for the person who started it."""


class TrainingError(Exception):
    """The run cannot be done as asked; the message says why and what would do."""


class Interrupted(Exception):
    """The run was stopped by hand; the message says how far it came. It can be resumed."""
