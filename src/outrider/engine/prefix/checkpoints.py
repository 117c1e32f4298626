"""Checkpoints of a prompt: the cells after which the state of recurrent layers is saved. Pure.

A state cannot be cut back to an earlier cell. So a prefill chunk has to end at every checkpoint, and a later
row can start only there. Checkpoints lie at ends of whole blocks: before the end of the first message, of
the last messages and of the prompt, and at regular distances. The prefix cache adds the places where another
text has branched off. Of an answer only the latest state is stored, that of its last complete block.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

CHECKPOINT_DISTANCE = 1024  # cells; a row that branches off recomputes at most about so many. Chosen by hand.
NUM_LAST_MESSAGES = 2  # messages at the prompt's end that have a checkpoint. Chosen by hand.


def prompt_checkpoints(token_ids: Sequence[int], end_ids: Collection[int], block_size: int) -> set[int]:
    """Numbers of cells after which a prompt's state is saved, each smaller than the prompt.

    `end_ids` are the tokens that end a message.
    """
    ends = [i + 1 for i, token_id in enumerate(token_ids) if token_id in end_ids]
    regular = range(CHECKPOINT_DISTANCE, len(token_ids), CHECKPOINT_DISTANCE)
    wanted = [*ends[:1], *ends[-NUM_LAST_MESSAGES:], *regular, len(token_ids)]
    return {(end - 1) // block_size * block_size for end in wanted} - {0}
