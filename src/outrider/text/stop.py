"""Owns the search for stop strings in text that arrives in pieces.

Must not know of tokens or of why text arrives as it does: the result is the same however the text is cut.

All stop strings are followed at once, a character at a time, in a trie with fallback links (Aho-Corasick).
The state is the longest end of the text that begins a stop string: just what must not be shown yet.

    text so far     . . . . shown . . . . [ held ]      len(held) == depth of the state <= longest stop string
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StopResult:
    """What one piece of text brought: the text that may be shown now, and the stop string it completed."""

    text: str
    matched: str | None = None


class StopStrings:
    """Passes text through up to the first stop string, and holds back what may turn into one.

    The match is the stop string that completes first as the text is read character by character; of those
    that complete on the same character, the one that starts first. The text shown ends where it starts.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise ValueError("a stop string must not be empty")
        self._root = _build_trie(stops) if stops else None
        self._state = self._root
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str, *, may_match: bool = True) -> StopResult:
        """Take the next piece. After a match nothing more is shown, and `matched` stays.

        Stop strings that end in a piece which may not match are text like any other.
        """
        if self._state is None:
            return StopResult(text)
        if self._matched is not None:
            return StopResult("", self._matched)
        seen = self._held + text
        state = self._state
        for end, character in enumerate(text, start=len(self._held) + 1):
            state = state.after(character)
            if may_match and state.completes is not None:
                return self._stop(seen[: end - len(state.completes)], state.completes)
        return self._pass(seen, state)

    def flush(self) -> str:
        """Return what is still held: the text is over, so it will not become a stop string."""
        held = self._held
        self._held = ""
        self._state = self._root
        return held

    def _pass(self, seen: str, state: "_State") -> StopResult:
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
    """The longest end of the text read so far that begins a stop string."""

    depth: int  # its length
    fallback: "_State | None" = None  # the next longest such end; None for the empty one
    completes: str | None = None  # the longest stop string that the text read so far ends with
    children: "dict[str, _State]" = field(default_factory=dict)

    def after(self, character: str) -> "_State":
        state = self
        while character not in state.children:
            if state.fallback is None:
                return state
            state = state.fallback
        return state.children[character]


def _build_trie(stops: Iterable[str]) -> _State:
    root = _State(depth=0)
    for stop in stops:
        _insert(root, stop)
    _link(root)
    return root


def _insert(root: _State, stop: str) -> None:
    state = root
    for depth, character in enumerate(stop, start=1):
        state = state.children.setdefault(character, _State(depth))
    state.completes = stop


def _link(root: _State) -> None:
    """Set the fallbacks, shorter states first: each builds on those before it."""
    queue = deque([root])
    while queue:
        state = queue.popleft()
        for character, child in state.children.items():
            child.fallback = state.fallback.after(character) if state.fallback else root
            child.completes = child.completes or child.fallback.completes
            queue.append(child)
