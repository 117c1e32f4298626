"""A rank other than 0: runs the steps that rank 0 sends, over its own part of the model."""

from __future__ import annotations

from outrider.step import step_message
from outrider.step.rank_disk import FollowerDisk, answer_question
from outrider.step.ranks import Ranks
from outrider.step.runner import Runner


def follow(ranks: Ranks, runner: Runner, disk: FollowerDisk | None = None) -> None:
    """Run steps until rank 0 says stop. `disk`: where this rank's parts of cached prefixes are."""
    ranks.rest()
    while True:
        message = ranks.receive()
        kind = int(message[0])
        if kind == step_message.STEP:
            runner.follow(step_message.decode(message))
        elif kind == step_message.RESET:
            runner.reset()
            ranks.rest()  # rank 0 resets when it has no more requests
        elif kind == step_message.CLEAR_PREFIXES:
            runner.clear_prefixes()
        elif kind == step_message.READ_FILES:
            answer_question(message, ranks, disk)
        elif kind == step_message.CLEAR_DISK:
            if disk is not None:
                disk.tier.clear()
        elif kind == step_message.STOP:
            return
        else:
            raise ValueError(f"unknown message {kind} from rank 0")
