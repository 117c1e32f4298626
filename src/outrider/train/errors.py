"""The two reasons why a training run stops early."""


class TrainingError(Exception):
    """The run cannot be done. The message gives the reason and what to do."""


class Interrupted(Exception):
    """The user stopped the run. The message gives its progress; the run can be resumed."""
