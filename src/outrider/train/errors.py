"""The two ways in which a training run stops early."""


class TrainingError(Exception):
    """The run cannot be done as asked. The message gives the reason and what to do."""


class Interrupted(Exception):
    """The user stopped the run. The message says how far it came; the run can be resumed."""
