"""Stop strings: the text of an answer is cut before the first one.

The result does not depend on where the text is cut into chunks. All stop strings are searched at once, one
character at a time, in a trie with fallback links (Aho-Corasick). The state is the longest end of the text
that begins a stop string: exactly the text that must not be shown yet.

    text so far     . . . . shown . . . . [ held ]      len(held) == depth of the state <= longest stop string
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class StopResult:
    """The text that may be shown now, and the stop string that was completed, if one was."""

    text: str
    matched: str | None = None


class StopStrings:
    """Passes text on up to the first stop string, and holds back text that may become a stop string.

    The match is the stop string that is complete first, reading character by character. Of two that are
    complete at the same character, the longer one matches. The shown text ends where the match starts.
    """

    def __init__(self, stops: Sequence[str], shows_match: bool = False) -> None:
        """`shows_match`: the shown text ends after the match, not before it."""
        if "" in stops:
            raise ValueError("a stop string must not be empty")
        self._shows_match = shows_match
        self._root = _build_trie(tuple(stops))
        self._state = self._root
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str, *, may_match: bool = True) -> StopResult:
        """Take the next chunk of text. After a match nothing more is shown, and `matched` stays.

        Without `may_match`, a stop string that ends in this chunk is plain text.
        """
        if self._matched is not None:
            return StopResult("", self._matched)
        seen = self._held + text
        state = self._state
        for end, character in enumerate(text, start=len(self._held) + 1):
            state = state.after(character)
            if may_match and state.completes is not None:
                num_shown = end if self._shows_match else end - len(state.completes)
                return self._stop(seen[:num_shown], state.completes)
        return self._pass(seen, state)

    def flush(self) -> str:
        """Return the held text: no text follows, so it cannot become a stop string."""
        held = self._held
        self._held = ""
        self._state = self._root
        return held

    def _pass(self, seen: str, state: _State) -> StopResult:
        num_shown = len(seen) - state.depth
        self._state = state
        self._held = seen[num_shown:]
        return StopResult(seen[:num_shown])

    def _stop(self, text: str, matched: str) -> StopResult:
        self._matched = matched
        self._held = ""
        return StopResult(text, matched)


@dataclass(slots=True, eq=False, repr=False)
class _State:
    """A node of the trie: the longest end of the text read so far that begins a stop string."""

    depth: int  # length of that end, in characters
    fallback: _State | None = None  # the next longest such end; None for the empty end
    completes: str | None = None  # the longest stop string that the text read so far ends with
    children: dict[str, _State] = field(default_factory=dict)

    def after(self, character: str) -> _State:
        state = self
        while character not in state.children:
            if state.fallback is None:
                return state
            state = state.fallback
        return state.children[character]


@lru_cache(maxsize=8)  # n answers of a request share the trie: it does not change
def _build_trie(stops: tuple[str, ...]) -> _State:
    root = _State(depth=0)
    for stop in stops:
        state = root
        for depth, character in enumerate(stop, start=1):
            state = state.children.setdefault(character, _State(depth))
        state.completes = stop
    queue = deque([root])
    while queue:  # set the fallbacks, shorter states first: each fallback builds on the shorter ones
        state = queue.popleft()
        for character, child in state.children.items():
            child.fallback = state.fallback.after(character) if state.fallback else root
            child.completes = child.completes or child.fallback.completes
            queue.append(child)
    return root
