"""Validates a rendered prompt, with less of a grammar for its tools if the grammar cannot be used.

A call without a grammar is better than no answer, so only a tool with `strict: true` insists on its schema.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from outrider.chat.renderer import ChatPrompt
from outrider.engine.validation import ValidatedRequest
from outrider.isolation.worker import WorkerUnavailable
from outrider.request import InvalidGrammar

log = logging.getLogger(__name__)

MAX_REASON = 200  # characters of the reason in the log; chosen by hand


def validated(
    prompt: ChatPrompt, validate: Callable[[ChatPrompt], ValidatedRequest]
) -> tuple[ChatPrompt, ValidatedRequest]:
    """The prompt that is served, and its request. Raises InvalidRequest."""
    is_first = True
    while True:
        try:
            return prompt, validate(prompt)
        except (InvalidGrammar, WorkerUnavailable) as error:
            if prompt.relaxed is None:
                if is_first or isinstance(error, WorkerUnavailable):
                    raise
                raise InvalidGrammar(
                    f"the schema of a tool with strict: true cannot be enforced: {error}"
                ) from error
            reason = " ".join(str(error).split())[:MAX_REASON]
            log.warning("the schemas of tools are not enforced: %s", reason)
            prompt, is_first = prompt.relaxed(), False
