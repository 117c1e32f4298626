"""Asks the grammar child process whether a grammar can be used, and remembers its verdicts."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from outrider.answer_form import Grammar
from outrider.grammar.backend import TokenizerSource
from outrider.grammar.bounds import check_bounds
from outrider.isolation.messages import Message
from outrider.isolation.worker import IsolatedWorker, JobFailed, JobTimedOut, WorkerLimits
from outrider.request import InvalidRequest

log = logging.getLogger(__name__)

MAX_VERDICTS = 4096  # about 1 KB each at most; chosen by hand
MAX_REASON_CHARACTERS = 600
# Chosen by hand. A schema of 57 KB takes 0.5 s and 20 MB.
LIMITS = WorkerLimits(memory_bytes=1 << 30, cpu_s=5, answer_s=60.0)


@dataclass(frozen=True)
class _Verdict:
    refusal: str | None
    num_bytes: int = 0  # of the compiled grammar
    is_final: bool = True  # False: it took too long, which may be the fault of a busy machine


class GrammarChecker:
    """Thread-safe. One process checks all grammars; it starts with the first one."""

    def __init__(self, source: Callable[[], TokenizerSource]) -> None:
        self._worker = IsolatedWorker("outrider.grammar.child", LIMITS, lambda: _set_up(source()))
        self._verdicts: OrderedDict[bytes, _Verdict] = OrderedDict()  # by the grammar's hash
        self._lock = threading.Lock()  # never held during a check

    def check(self, grammar: Grammar) -> int:
        """The bytes that the compiled grammar takes.

        Raises InvalidRequest if it cannot be used, WorkerUnavailable if it could not be checked.
        """
        check_bounds(grammar)
        key = hashlib.sha256(f"{grammar.kind} {grammar.text}".encode(errors="surrogatepass")).digest()
        with self._lock:
            verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = self._ask(grammar)
        if verdict.is_final:
            self._remember(key, verdict)
        if verdict.refusal is not None:
            raise InvalidRequest(verdict.refusal)
        return verdict.num_bytes

    def close(self) -> None:
        self._worker.close()

    def _remember(self, key: bytes, verdict: _Verdict) -> None:
        with self._lock:
            self._verdicts[key] = verdict
            self._verdicts.move_to_end(key)
            if len(self._verdicts) > MAX_VERDICTS:
                self._verdicts.popitem(last=False)

    def _ask(self, grammar: Grammar) -> _Verdict:
        try:
            text = grammar.text.encode()
        except UnicodeEncodeError:
            return _Verdict(f"the {grammar.kind} grammar is not valid Unicode text")
        try:
            reply = self._worker.call({"kind": grammar.kind}, text).fields
        except JobFailed as failure:
            log.warning("a %s grammar of %d characters is refused: %s", grammar.kind, len(text), failure)
            is_final = not isinstance(failure, JobTimedOut)
            return _Verdict(f"the {grammar.kind} grammar is too complex: {failure}", is_final=is_final)
        if "refused" in reply:
            refusal = str(reply["refused"])[:MAX_REASON_CHARACTERS]
            return _Verdict(refusal, is_final=not reply.get("took_too_long", False))
        return _Verdict(None, int(reply["num_bytes"]))


def _set_up(source: TokenizerSource) -> Message:
    fields = {"vocab_size": source.vocab_size, "eos_ids": list(source.eos_ids)}
    return Message(fields, source.text.encode())
