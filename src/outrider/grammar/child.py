"""The grammar child process: compiles a grammar, and walks along it, before the server does.

llguidance recurses over rules and references without a limit, and some grammars take very long. Here that
costs this process only. Stacks are smaller here than in the server: what fits here fits there.
"""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from outrider.answer_form import Grammar
from outrider.grammar.backend import TokenizerSource, error_of, new_matcher
from outrider.isolation.child import Handler, Reply, serve
from outrider.isolation.messages import Message
from outrider.isolation.stacks import run_with_stack
from outrider.request import InvalidRequest

MIB = 1 << 20
COMPILE_STACK_BYTES = 16 * MIB  # the server compiles with four times as much: see compiler.py
WALK_STACK_BYTES = 2 * MIB  # less than the engine thread has: 8 MiB on Linux, 16 MiB on macOS
MAX_COMPILED_BYTES = 64 * MIB  # chosen by hand; a schema of 57 KB takes 8 MB
NUM_WALKS = 6  # chosen by hand
NUM_POSITIONS = 24  # of all walks together; chosen by hand: about 0.2 ms each
MAX_STEP_S = 0.2  # processor time of one mask or token; chosen by hand: common grammars take 1 ms
CLOSING = '"}],:'  # characters that lead through a JSON value quickly


class TookTooLong(InvalidRequest):
    """Another time, on a machine that is less busy, the same grammar may be quick enough."""


def new_handler(message: Message) -> Handler:
    source = TokenizerSource(
        str(message.data, "utf-8"), message.fields["vocab_size"], tuple(message.fields["eos_ids"])
    )
    tokenizer = source.build()
    checker = _Checker(tokenizer, source)

    def handle(job: Message) -> Reply:
        try:
            return {"num_bytes": checker.check(Grammar(job.fields["kind"], str(job.data, "utf-8")))}, ()
        except InvalidRequest as refusal:
            return {"refused": str(refusal), "took_too_long": isinstance(refusal, TookTooLong)}, ()

    return handle


class _Checker:
    def __init__(self, tokenizer: Any, source: TokenizerSource) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = source.vocab_size
        self._eos_ids = [i for i in source.eos_ids if i < source.vocab_size]
        ids = [tokenizer.tokenize_str(character) for character in CLOSING]
        self._closing_ids = np.array(
            [found[0] for found in ids if len(found) == 1 and found[0] < source.vocab_size], int
        )

    def check(self, grammar: Grammar) -> int:
        """The bytes that the compiled grammar takes. Raises InvalidRequest."""
        before = allocated_bytes()
        matcher = run_with_stack(COMPILE_STACK_BYTES, lambda: new_matcher(self._tokenizer, grammar))
        num_bytes = max(0, allocated_bytes() - before)
        if num_bytes > MAX_COMPILED_BYTES:
            raise InvalidRequest(
                f"the {grammar.kind} grammar is too complex: compiled, it takes {num_bytes / MIB:.0f} MiB, "
                f"and the limit is {MAX_COMPILED_BYTES // MIB}"
            )
        run_with_stack(WALK_STACK_BYTES, lambda: self._walk_all(matcher, grammar.kind))
        return num_bytes

    def _walk_all(self, matcher: Any, kind: str) -> None:
        """Compute masks along several ways through the grammar. The ways depend on the grammar alone."""
        num_left = NUM_POSITIONS
        try:
            for seed in range(NUM_WALKS):
                num_left -= self._walk(matcher.deep_copy(), random.Random(seed), seed % 2 == 1, num_left)
        except InvalidRequest as refusal:
            raise type(refusal)(f"the {kind} grammar {refusal}") from None

    def _walk(self, matcher: Any, choice: random.Random, prefers_closing: bool, most: int) -> int:
        """Walk over at most so many positions, and at most half of all. Returns their number."""
        for position in range(min(most, NUM_POSITIONS // 2)):
            is_allowed = self._is_allowed(matcher)
            ids = self._closing_ids[is_allowed[self._closing_ids]] if prefers_closing else ()
            if not len(ids):
                ids = is_allowed.nonzero()[0]
            if not len(ids):
                if position == 0:
                    raise InvalidRequest("allows only an empty answer")
                return position
            token_id = int(choice.choice(ids))
            _limited(matcher, partial(matcher.consume_token, token_id))
        return min(most, NUM_POSITIONS // 2)

    def _is_allowed(self, matcher: Any) -> np.ndarray:
        """True for each id that may come next, without EOS."""
        mask = np.frombuffer(_limited(matcher, matcher.compute_bitmask), np.uint8)
        is_allowed = np.unpackbits(mask, bitorder="little")[: self._vocab_size].astype(bool)
        is_allowed[self._eos_ids] = False
        return is_allowed


def _limited(matcher: Any, work: Callable[[], Any]) -> Any:
    """The result of one call of the matcher. Raises InvalidRequest if it fails, TookTooLong."""
    started_s = time.thread_time()
    result = work()
    seconds = time.thread_time() - started_s
    if matcher.is_error():
        raise InvalidRequest(f"is too complex: {error_of(matcher)}")
    if seconds > MAX_STEP_S:
        raise TookTooLong(
            f"is too complex: the tokens allowed at one position took {seconds:.2f} s to compute, and the "
            f"limit is {MAX_STEP_S:g} s"
        )
    return result


class _MallocInfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd",
            "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


def allocated_bytes() -> int:
    """Bytes that native code has allocated now; 0 where the C library cannot say (other than glibc's)."""
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is None:
        return 0
    function.restype = _MallocInfo
    info = function()
    return int(info.uordblks + info.hblkhd)


if __name__ == "__main__":
    serve(new_handler)
