"""The prefix cache as the scheduler sees it: what a row need not compute, and what of it is worth keeping.

Decides, in pure Python, what the runner copies between rows' slots and cached blocks:

    a row prefills   ->  `prepare`  the longest usable prefix is loaded into its slot; it waits for an older
                                    row that computes what both need, and for the disk
    a step is done   ->  `keep`     blocks that are complete now are saved, prompt and answer alike

A cell is known by what went into it (`Sequence.keys`): where the head follows, by a token and the next one.
So a prefix ends one cell before the first difference there, and its last pair is right. Rows that the head
does not follow leave nothing in its cells: their tree is another.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from outrider.cache.prefix_index import Match, Node, PrefixIndex, num_common
from outrider.engine.draft_planner import MAX_HEAD_LAG
from outrider.engine.prefix.checkpoints import next_stop, prompt_stops
from outrider.engine.prefix.disk import BlockDisk, Fetches, file_name
from outrider.engine.prefix.match import first_deferred, last_state, num_followed, num_head_cached, pieces
from outrider.engine.sequence import Sequence
from outrider.plan import LoadCells, PrefixCopies, RowPlan, SaveCells, SaveState

LEAST_LOADED = 16  # cells; fewer are computed as quickly
ANSWER_BLOCKS = 4  # of an answer are saved together, which is cheaper
MOST_COPIED_BYTES = 256 << 20  # loads, and saves, of one step: rows that decode do not wait for more


@dataclass
class _Place:
    """How far a row has come in its tree."""

    tree: str
    node: Node
    depth: int = 0  # blocks down to `node`
    stops: set[int] = field(default_factory=set)  # where its state is to be kept
    moving: Node | None = None  # where the answer's latest state is
    common: dict[int, int] = field(default_factory=dict)  # by another row's id: how much both share
    fetches: Fetches | None = None


class PrefixCache:
    def __init__(
        self,
        index: PrefixIndex,
        bytes_per_cell: int,
        *,
        has_states: bool = False,
        disk: BlockDisk | None = None,
        least_loaded: int = LEAST_LOADED,
    ) -> None:
        self.index = index
        self.disk = disk
        self.num_hit_cells = 0  # loaded instead of computed, ever
        self._has_states = has_states
        self._least_loaded = least_loaded
        self._most_cells = max(index.block_size, MOST_COPIED_BYTES // max(1, bytes_per_cell))
        self._places: dict[int, _Place] = {}
        self._saves: list[SaveCells] = []
        self._states: list[SaveState] = []
        self._loads: list[LoadCells] = []
        self._held: list[Node] = []  # blocks that this plan's loads read: no arrival may push them out

    # -- rows that prefill -------------------------------------------------------------------------------

    def prepare(self, row: Sequence, older: Iterable[Sequence]) -> bool:
        """Give a prefilling row what is there. Whether it is to compute what comes next itself, and now."""
        if row.failures:
            return True
        place = self._place(row)
        if self.disk is not None and place.fetches is not None:
            self.disk.advance(place.fetches)
        gets_more = self._fill(row, place)
        if gets_more or any(self._is_ahead(other, row, place) for other in older):
            return False
        if self.disk is None:
            return True
        if place.fetches is None:
            place.fetches = self._fetch(self.disk, row, place)
        return not place.fetches.are_under_way

    def stop_before(self, row: Sequence, end: int) -> int:
        """Where a prefill chunk that may go up to `end` has to end, for the sake of a state."""
        if not self._has_states or row.failures:
            return end
        stop = next_stop(self._place(row).stops, row.num_cached)
        return end if stop is None else min(end, stop)

    def most_drafts(self, row: Sequence, under_way: RowPlan | None = None) -> int:
        """Drafts that a decoding row may feed without running over the end of a block.

        In the step after one that is under way: wherever that leaves it, short of the block's end.
        """
        block_size = self.index.block_size
        start = row.num_cached + (0 if under_way is None else under_way.num_fed)
        return block_size - 1 - start % block_size if self._has_states else block_size

    def may_end_block(self, row: Sequence, num_fed: int) -> bool:
        """Whether a step that feeds so many tokens may leave the row where its state is to be kept."""
        block_size = self.index.block_size
        return self._has_states and row.num_cached % block_size + num_fed >= block_size

    @property
    def has_copies(self) -> bool:
        """Whether the next plan has something to copy, or memory to give back."""
        return bool(self._saves or self._states or self._loads or self.index.has_dropped)

    # -- what is kept ------------------------------------------------------------------------------------

    def keep(self, row: Sequence, *, to_the_end: bool = False) -> None:
        """Save the blocks that a row has complete; `to_the_end` the begun one too."""
        if row.failures or row.slot is None:
            return
        place = self._place(row)
        num_cells = row.num_final
        block_size = self.index.block_size
        num_new = num_cells - place.depth * block_size
        if row.is_decoding and not (to_the_end or self._has_states) and num_new < ANSWER_BLOCKS * block_size:
            return
        while True:
            start = place.depth * block_size
            end = min(start + block_size, num_cells)
            is_begun = end - start < block_size
            if end <= start or (is_begun and (not to_the_end or self._has_states)):
                break  # where a state is needed, half a block is no use
            node = self._kept(row, place.node, start, end)
            if node is None or end - start < block_size:
                break
            place.node, place.depth = node, place.depth + 1

    def keep_state(self, row: Sequence) -> None:
        """Save the state of a row that stands at the end of a block that is kept, where that is worth it."""
        if not self._has_states or row.failures or row.slot is None or row.id not in self._places:
            return
        place = self._place(row)
        if place.depth == 0 or row.num_cached != place.depth * self.index.block_size:
            return
        is_answer = row.num_cached > row.num_prompt
        if not is_answer and row.num_cached not in place.stops:
            return
        state_id = self.index.add_state(place.node)
        if state_id is None:
            return
        name = None if is_answer else self._file_name(place.node, is_state=True)  # too many for a disk
        self._states.append(SaveState(state_id, row.slot, name))
        if is_answer:
            if place.moving is not None and place.moving.is_alive:
                self.index.drop_state(place.moving)
            place.moving = place.node

    def leave(self, row: Sequence) -> None:
        """The row gives its slot up."""
        place = self._places.pop(row.id, None)
        if place is not None and all(other.tree != place.tree for other in self._places.values()):
            self.index.forget_if_empty(place.tree)

    def clear(self) -> None:
        """Forget everything: asked to, or because a step failed and its cells cannot be trusted."""
        self.index.clear()
        self._saves.clear()
        self._states.clear()
        self._loads.clear()
        self._release()

    # -- for the plan ------------------------------------------------------------------------------------

    def receive(self) -> None:
        """Take what the disk has brought since the last plan."""
        if self.disk is not None:
            self.disk.receive()

    def take_copies(self) -> PrefixCopies:
        arrivals = self.disk.take_arrivals() if self.disk is not None else ()
        drops = self.index.take_dropped()
        gone = set(drops)
        copies = PrefixCopies(
            tuple(drops),
            tuple(save for save in self._saves if save.block_id not in gone),
            tuple(save for save in self._states if save.state_id not in gone),
            tuple(arrival for arrival in arrivals if arrival.id not in gone),
            tuple(self._loads),
        )
        self._saves, self._states, self._loads = [], [], []
        self._release()
        return copies

    # -- inside ------------------------------------------------------------------------------------------

    def _place(self, row: Sequence) -> _Place:
        """Where the row stands; at the root again if its block is gone."""
        place = self._places.get(row.id)
        if place is None:
            tree = f"{'with head' if row.feeds_head else 'without head'}/{row.params.cache_salt}"
            place = self._places[row.id] = _Place(tree, self.index.root(tree))
            if self._has_states:
                prompt = row.tokens[: row.num_prefill]
                place.stops = prompt_stops(prompt, row.stop_ids, self.index.block_size)
        if not place.node.is_alive:
            place.node, place.depth = self.index.root(place.tree), 0
        return place

    def _fill(self, row: Sequence, place: _Place) -> bool:
        """Load what is cached beyond the row's own cells. Whether more than a step's share is there."""
        match = self.index.match(place.tree, _prompt(row))
        usable = self._usable(row, match, place)
        room = self._most_cells - sum(load.num_cells for load in self._loads)
        is_too_much = usable - row.num_cached > room
        if is_too_much and not self._has_states:
            usable = row.num_cached + room
        elif is_too_much and self._loads:  # a state is loaded with all cells before it, next time
            return True
        if usable - row.num_cached >= self._least(row):
            assert row.slot is not None
            # What its head has missed is loaded again: the match may have it with the head by now.
            start = min(row.num_cached, row.num_head_cached) if row.feeds_head else row.num_cached
            self._loads.append(self._load(row.slot, start, usable, match))
            self._hold(match.nodes[(usable - 1) // self.index.block_size])
            self.num_hit_cells += usable - row.num_cached
            row.count_loaded(usable - row.num_cached)
            row.num_cached = usable
            row.num_head_cached = max(
                row.num_head_cached, num_head_cached(match, usable, self.index.block_size)
            )
            self._settle(place, match, usable)
        return is_too_much and not self._has_states

    def _usable(self, row: Sequence, match: Match, place: _Place) -> int:
        """Cells of a match that the row can start with."""
        usable = num_followed(match, self.index.block_size)
        headed = max(row.num_head_cached, num_head_cached(match, usable, self.index.block_size))
        usable = min(usable, headed + MAX_HEAD_LAG)
        if not self._has_states:
            return usable
        if row.num_cached == 0:  # this is where texts branch: the next one shall find a state here
            place.stops |= {usable // self.index.block_size * self.index.block_size} - {0}
        return last_state(match, usable)

    def _fetch(self, disk: BlockDisk, row: Sequence, place: _Place) -> Fetches:
        """Ask for what comes behind the cached blocks of the row's text."""
        keys = _prompt(row)
        match = self.index.match(place.tree, keys)
        num_whole = match.num_keys // self.index.block_size
        node = match.nodes[num_whole - 1] if num_whole else self.index.root(place.tree)
        return disk.start(node, keys[num_whole * self.index.block_size :], self._has_states)

    def _hold(self, node: Node) -> None:
        self.index.hold(node)
        self._held.append(node)

    def _release(self) -> None:
        for node in self._held:
            self.index.release(node)
        self._held.clear()

    def _least(self, row: Sequence) -> int:
        """Cells for which a load is worth while; a row that has loaded some takes the rest too."""
        return 1 if row.counters.num_loaded else self._least_loaded

    def _load(self, slot: int, start: int, end: int, match: Match) -> LoadCells:
        found = pieces(match, start, end, self.index.block_size)
        state_id = match.nodes[(end - 1) // self.index.block_size].state_id if self._has_states else None
        return LoadCells(slot, start, found, state_id)

    def _settle(self, place: _Place, match: Match, num_cells: int) -> None:
        """The row holds these cells of the match: its whole blocks need not be saved, but those that the head
        was not fed are saved again once it has caught up."""
        place.depth = min(num_cells // self.index.block_size, first_deferred(match))
        place.node = match.nodes[place.depth - 1] if place.depth else self.index.root(place.tree)

    def _is_ahead(self, other: Sequence, row: Sequence, place: _Place) -> bool:
        """Whether an older row is computing cells that this one needs next."""
        if other.failures or other is row or self._place(other).tree != place.tree:
            return False
        if other.id not in place.common:
            place.common[other.id] = num_common(_prompt(other), _prompt(row))
        end = place.common[other.id]
        if self._has_states:
            end = end // self.index.block_size * self.index.block_size
        if end - row.num_cached < self._least(row) or not row.num_cached <= other.num_cached < end:
            return False
        if self._has_states:
            self._place(other).stops.add(end)
        return True

    def _kept(self, row: Sequence, parent: Node, start: int, end: int) -> Node | None:
        """The node for these cells, saved now if it was not there; None when there is no room."""
        assert row.slot is not None
        keys, num_fed = row.keys(start, end), row.num_head_cached_of(start, end)
        node = self.index.child(parent, keys)
        is_old = node is not None and len(node.keys) == len(keys) and node.num_head_cached < num_fed
        if node is not None and not is_old:
            self.index.touch(node)
            return node
        if sum(save.end - save.start for save in self._saves) + len(keys) > self._most_cells:
            return None
        if node is not None:
            self.index.renew(node, num_fed)
        else:
            node = self.index.insert(parent, keys, num_fed)
        if node is not None:
            self._saves.append(SaveCells(node.block_id, row.slot, start, end, self._file_name(node)))
            row.count_saved(start, end)
        return node

    def _file_name(self, node: Node, is_state: bool = False) -> str | None:
        """What to call it on disk; None when it is there already, or not wanted there."""
        if self.disk is None or len(node.keys) < self.index.block_size or not node.is_headed:
            return None
        name = file_name(node.digest, is_state)
        return None if self.disk.has(name) else name


def _prompt(row: Sequence) -> tuple[int, ...]:
    """The cells that a prefilling row may find elsewhere: at least one token is left to feed."""
    return row.keys(0, max(0, row.num_prefill - max(1, row.num_ahead)))
