"""The prefix cache of the scheduler: the cells that a row loads instead of computing, or saves.

Pure Python. The cache decides what the runner copies between a row's slot and cached blocks. The decisions
are collected in `pending` (prefix/copies.py):

    a row prefills     `ready_rows`   loads the longest cached prefix into the row's slot. The row waits while
                                      an older row computes cells that both need, or while the disk reads.
    a step is done     `save`         saves the blocks that the row has completed, of prompt and answer alike.
    a plan is built    `take_copies`  hands the collected loads and saves to the plan.

A cell is found by its key. The key names every token that the cell's content depends on, except those
before:

    tokens             a       b       c       d
    key, no head       a       b       c       d      a trunk's cell depends on its own token
    key, with head     (a,b)   (b,c)   (c,d)          a head's cell depends on the next token too

So the shared prefix of two rows with a head ends one cell before their first different token. A row that
never drafts leaves the head's part of its cells empty. If it stores what the head would have been fed
(`DraftState.stores_head_inputs`), its cells are like those of a row whose head was paused. Then both kinds of
rows share one tree, and the head of a row that drafts catches up. Otherwise such rows have their own tree.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

from outrider.cache.disk_tier import DiskTier
from outrider.cache.prefix_index import Node, PrefixIndex, PrefixMatch, num_common
from outrider.engine.block_pool import BlockPool
from outrider.engine.draft_planner import MAX_HEAD_LAG
from outrider.engine.prefix.checkpoints import prompt_checkpoints
from outrider.engine.prefix.copies import PendingCopies
from outrider.engine.prefix.disk import DiskLoader, PrefixFetch, file_name
from outrider.engine.prefix.no_cache import NoPrefixCache
from outrider.engine.sequence import Sequence
from outrider.plan import BLOCK_SIZE, CacheGeometry, PrefixCopies, RowPlan, SaveState
from outrider.request import MAX_DEPTH

MIN_LOADED_CELLS = 16  # a shorter prefix is computed, not loaded; chosen by hand
ANSWER_BLOCKS = 4  # complete blocks of an answer that are saved together: one copy costs less than four
# Bytes that one step loads, or saves, at most: the decoding rows wait for these copies. Chosen by hand.
MAX_COPIED_BYTES = 256 << 20


def new_prefix_cache(
    geometry: CacheGeometry, budget_bytes: int, tier: DiskTier | None
) -> PrefixCache | NoPrefixCache:
    """A cache of `budget_bytes` of memory. A budget of 0 disables the cache."""
    if budget_bytes <= 0:
        return NoPrefixCache()
    per_cell, per_state = geometry.bytes_per_cell, geometry.bytes_per_slot
    index = PrefixIndex(budget_bytes, per_cell, per_state, geometry.block_size or BLOCK_SIZE)
    disk = None if tier is None else DiskLoader(tier, index)
    return PrefixCache(index, per_cell, has_states=per_state > 0, disk=disk)


@dataclass
class _RowProgress:
    """The blocks of a row that are in the tree."""

    tree: str
    node: Node  # the row's last block that is saved
    num_blocks: int = 0  # blocks from the root down to `node`
    checkpoints: set[int] = field(default_factory=set)  # numbers of cells after which the state is saved
    answer_state: Node | None = None  # the block that holds the latest state of the row's answer
    num_shared: dict[int, int] = field(default_factory=dict)  # by another row's id: keys that both begin with
    fetch: PrefixFetch | None = None  # blocks that the row waits for the disk to read


class PrefixCache:
    """The cached prefixes of one scheduler. `NoPrefixCache` has the same methods and does nothing."""

    def __init__(
        self,
        index: PrefixIndex,
        bytes_per_cell: int,
        *,
        has_states: bool = False,
        disk: DiskLoader | None = None,
        min_loaded_cells: int = MIN_LOADED_CELLS,
    ) -> None:
        """`has_states`: the model has recurrent layers, whose state can be saved and loaded but not cut."""
        self.index = index
        self.disk = disk
        self.num_hit_cells = 0  # cells loaded instead of computed, since the start
        self._has_states = has_states
        self._min_loaded_cells = min_loaded_cells
        self._progress_by_row: dict[int, _RowProgress] = {}
        max_cells = max(index.block_size, MAX_COPIED_BYTES // max(1, bytes_per_cell))
        self.pending = PendingCopies(index, max_cells)

    def use_blocks(self, pool: BlockPool | None, block_size: int | None) -> None:
        """Where rows keep their cells by blocks: these are shared with rows that start with the same text."""
        if pool is not None and block_size != self.index.block_size:
            raise ValueError(
                f"rows have blocks of {block_size} cells, cached prefixes {self.index.block_size}"
            )
        self.pending.pool = pool

    @property
    def num_bytes(self) -> int:
        """Bytes of cached blocks and states, once the next plan has run."""
        return self.index.num_bytes

    # -- prefilling rows ---------------------------------------------------------------------------------

    def ready_rows(self, prefilling: Rows[Sequence]) -> list[Sequence]:
        """Load what is cached for these rows. Return the rows that compute their next chunk in this step.

        The other rows wait: for the rest of a large load, for an older row that computes cells that they
        need, or for the disk.
        """
        if self.disk is not None:
            self.disk.receive()
        return [row for row in prefilling if self._is_ready(row, prefilling)]

    def _is_ready(self, row: Sequence, prefilling: Rows[Sequence]) -> bool:
        if row.failures or not row.is_exact:
            return True
        progress = self._progress(row)
        if self.disk is not None and progress.fetch is not None:
            self.disk.advance(progress.fetch)
        has_more = self._load(row, progress)
        if has_more or any(self._waits_for(other, row, progress) for other in prefilling):
            return False
        if self.disk is None:
            return True
        if progress.fetch is None:
            progress.fetch = self._start_fetch(self.disk, row, progress)
        return progress.fetch.is_done

    def chunk_end(self, row: Sequence, end: int) -> int:
        """Where a prefill chunk that may reach `end` has to end: at the next cell whose state is saved."""
        if not self._has_states or row.failures or not row.is_exact:
            return end
        return min(
            (stop for stop in self._progress(row).checkpoints if row.num_cached < stop < end), default=end
        )

    def _load(self, row: Sequence, progress: _RowProgress) -> bool:
        """Load cached cells behind the row's own. True if this step cannot load all of them."""
        size = self.index.block_size
        match = self.index.match(progress.tree, _prompt_keys(row))
        end = self._num_usable(row, match, progress)
        end_now = self.pending.end_of_load(match, row.num_cached, end)
        exceeds_space = end_now < end
        if exceeds_space and self._has_states and self.pending.loads:
            return True  # a state needs all cells before it: both are loaded in a later step
        if exceeds_space and not self._has_states:
            end = end_now
        if end - row.num_cached >= self._min_cells(row):
            # Cells that the row's head was not fed are loaded again: the match may have the head's part now.
            start = min(row.num_cached, row.num_head_cached) if row.feeds_head else row.num_cached
            last = match.nodes[(end - 1) // size]
            state_id = last.state_id if self._has_states else None
            self.num_hit_cells += end - row.num_cached
            row.count_loaded(end - row.num_cached)
            row.num_cached = end
            row.num_head_cached = max(row.num_head_cached, match.num_head_cached(end))
            self.pending.load(row, start, match.pieces(start, end), last, state_id)
            # Loaded blocks need not be saved. Those that the head was not fed are saved again once it was.
            progress.num_blocks = min(end // size, match.first_deferred) if row.feeds_head else end // size
            root = self.index.root(progress.tree)
            progress.node = match.nodes[progress.num_blocks - 1] if progress.num_blocks else root
        return exceeds_space and not self._has_states

    def _num_usable(self, row: Sequence, match: PrefixMatch, progress: _RowProgress) -> int:
        """Cells of a match that the row can start with."""
        usable = match.num_keys
        if row.feeds_head:
            usable = match.num_loadable
            num_head_cached = max(row.num_head_cached, match.num_head_cached(usable))
            usable = min(usable, num_head_cached + MAX_HEAD_LAG)
        if not self._has_states:
            return usable
        if row.num_cached == 0:  # another text branches off here: save a state for the next such text
            progress.checkpoints |= {usable // self.index.block_size * self.index.block_size} - {0}
        return match.last_state(usable)

    def _min_cells(self, row: Sequence) -> int:
        """A row that has loaded cells loads every further one: its prefix is long enough already."""
        return 1 if row.counters.num_loaded else self._min_loaded_cells

    def _waits_for(self, older: Sequence, row: Sequence, progress: _RowProgress) -> bool:
        """True if an older row is computing cells that this row needs next."""
        if older.id >= row.id or older.failures or not older.is_exact:
            return False
        older_progress = self._progress(older)
        if older_progress.tree != progress.tree:
            return False
        if older.id not in progress.num_shared:
            progress.num_shared[older.id] = num_common(_prompt_keys(older), _prompt_keys(row))
        end = progress.num_shared[older.id]
        if row.feeds_head and not older.feeds_head:  # the head has to catch up with these cells
            end = min(end, max(row.num_head_cached, older.num_head_cached) + MAX_HEAD_LAG)
        if self._has_states:
            end = end // self.index.block_size * self.index.block_size
        if end - row.num_cached < self._min_cells(row) or not row.num_cached <= older.num_cached < end:
            return False
        if self._has_states:
            older_progress.checkpoints.add(end)
        return True

    def _start_fetch(self, disk: DiskLoader, row: Sequence, progress: _RowProgress) -> PrefixFetch:
        """Request the blocks after the cached ones from the disk."""
        keys = _prompt_keys(row)
        match = self.index.match(progress.tree, keys)
        num_whole = match.num_keys // self.index.block_size
        node = match.nodes[num_whole - 1] if num_whole else self.index.root(progress.tree)
        return disk.start(node, keys[num_whole * self.index.block_size :], self._has_states)

    # -- decoding rows -----------------------------------------------------------------------------------

    def max_drafts(self, row: Sequence, in_flight: RowPlan | None = None) -> int:
        """Drafts that a decoding row may feed without crossing the end of a block, where its state is saved.

        `in_flight`: the row's part in a step that is not read yet. The limit then holds for the step after
        it, for every number of accepted drafts that does not reach the end of the block.
        """
        if not self._has_states:
            return MAX_DEPTH
        start = row.num_cached + (0 if in_flight is None else in_flight.num_fed)
        return self.index.block_size - 1 - start % self.index.block_size

    def may_end_block(self, row: Sequence, num_fed: int) -> bool:
        """True if a step that feeds `num_fed` tokens may leave the row where its state has to be saved."""
        return self._has_states and row.num_cached % self.index.block_size + num_fed >= self.index.block_size

    # -- saving ------------------------------------------------------------------------------------------

    def save(self, row: Sequence, *, to_end: bool = False) -> None:
        """After a step: save the blocks that the row has completed, and its state at the end of a block.

        `to_end`: save the cells of the block that is not complete, too.
        """
        self._save_cells(row, to_end)
        self._save_state(row)

    def save_before_leaving(self, row: Sequence) -> None:
        """Save all cells of a row that gives up its slot between steps, but not its state.

        A step in flight does not change these cells. It may change the state.
        """
        self._save_cells(row, to_end=True)

    def _save_cells(self, row: Sequence, to_end: bool) -> None:
        if row.failures or row.slot is None or not row.is_exact:
            return
        progress = self._progress(row)
        size, num_cells = self.index.block_size, row.num_final
        waits_for_more = row.is_decoding and not (to_end or self._has_states)
        if waits_for_more and num_cells - progress.num_blocks * size < ANSWER_BLOCKS * size:
            return
        saves_tail = to_end and not self._has_states  # a state, without which no row can start, ends a block
        while (start := progress.num_blocks * size) < num_cells:
            end = min(start + size, num_cells)
            is_tail = end - start < size
            if is_tail and not saves_tail:
                return
            node = self._save_block(row, progress.node, start, end)
            if node is None or is_tail:
                return
            progress.node, progress.num_blocks = node, progress.num_blocks + 1

    def _save_block(self, row: Sequence, parent: Node, start: int, end: int) -> Node | None:
        """The block of these cells, saved now if it is new. None if the index or this step has no room."""
        keys, num_head_cached = row.keys(start, end), row.num_head_cached_of(start, end)
        node = self.index.child(parent, keys)
        if node is not None and (len(node.keys) > len(keys) or node.num_head_cached >= num_head_cached):
            self.index.touch(node)
            return node
        if not self.pending.has_room_for(len(keys)):
            return None
        if node is not None:  # the head was fed more of it now
            self.index.renew(node, num_head_cached)
        else:
            node = self.index.insert(parent, keys, num_head_cached)
        if node is not None:
            self.pending.save(row, node, start, end, self._file_name(node, row))
            row.count_saved(start, end)
        return node

    def _save_state(self, row: Sequence) -> None:
        """Save the state of a row at the end of a saved block, at checkpoints and in answers."""
        if not self._has_states or row.failures or row.slot is None or row.id not in self._progress_by_row:
            return
        progress = self._progress(row)
        if progress.num_blocks == 0 or row.num_cached != progress.num_blocks * self.index.block_size:
            return
        is_answer = row.num_cached > row.num_prompt
        if not is_answer and row.num_cached not in progress.checkpoints:
            return
        state_id = self.index.add_state(progress.node)
        if state_id is None:
            return
        # Answers have too many states for a disk.
        name = None if is_answer else self._state_file_name(progress.node)
        self.pending.states.append(SaveState(state_id, row.slot, name))
        if is_answer:  # only the latest state of an answer is stored
            if progress.answer_state is not None and progress.answer_state.is_alive:
                self.index.drop_state(progress.answer_state)
            progress.answer_state = progress.node

    def _file_name(self, node: Node, row: Sequence) -> str | None:
        """The name on disk. None for a file that exists, a tail, or a block that the row's head was not fed.

        The blocks of a row that never drafts have a name of their own: the head's part is missing.
        """
        if self.disk is None or len(node.keys) < self.index.block_size:
            return None
        name, has = file_name(node.digest), self.disk.tier.has
        if not node.is_head_complete:
            if row.feeds_head or has(name):
                return None
            name = file_name(node.digest, "headless")
        return None if has(name) else name

    def _state_file_name(self, node: Node) -> str | None:
        if self.disk is None:
            return None
        name = file_name(node.digest, "state")
        return None if self.disk.tier.has(name) else name

    # -- rows and plans ----------------------------------------------------------------------------------

    def leave(self, row: Sequence) -> None:
        """Forget a row that gives up its slot."""
        progress = self._progress_by_row.pop(row.id, None)
        others = self._progress_by_row.values()
        if progress is not None and all(other.tree != progress.tree for other in others):
            self.index.forget_if_empty(progress.tree)

    def clear(self) -> None:
        """Forget every block: at a client's request, or because a step failed and its cells may be wrong."""
        self.index.clear()
        self.pending.clear()

    @property
    def has_copies(self) -> bool:
        """True if the next plan has cells to copy or memory to free."""
        return bool(self.pending)

    def take_copies(self) -> PrefixCopies:
        """What the next step copies and frees. Every copy is handed out once."""
        return self.pending.take(self.disk.take_arrivals() if self.disk is not None else ())

    def wait_for_disk(self, timeout_s: float) -> None:
        """Wait until the disk has read a file, or for `timeout_s`."""
        if self.disk is not None:
            self.disk.tier.wait_for_fetched(timeout_s)

    def check_integrity(self) -> None:
        """Raise if the index is inconsistent."""
        self.index.check_integrity()

    def _progress(self, row: Sequence) -> _RowProgress:
        """The row's progress. A row whose block was evicted starts at the root again."""
        progress = self._progress_by_row.get(row.id)
        if progress is None:
            tree = _tree_name(row)
            progress = self._progress_by_row[row.id] = _RowProgress(tree, self.index.root(tree))
            if self._has_states:
                prompt = row.tokens[: row.num_prefill]
                progress.checkpoints = prompt_checkpoints(prompt, row.stop_ids, self.index.block_size)
        if not progress.node.is_alive:
            progress.node, progress.num_blocks = self.index.root(progress.tree), 0
        return progress


def _tree_name(row: Sequence) -> str:
    """Rows share cached prefixes only with rows of the same name: the cells of others differ."""
    head = "with head" if row.has_head_cells else "without head"
    adapter = "" if row.adapter is None else f", adapter {row.adapter.fingerprint}"
    return f"{head}{adapter}/{row.params.cache_salt}"


def _prompt_keys(row: Sequence) -> tuple[int, ...]:
    """Keys of the cells that a prefilling row may load. At least one token is left for the row to feed.

    A row that wants the log-probabilities of its prompt has to compute all of its tokens.
    """
    if row.params.prompt_logprobs is not None:
        return ()
    return row.keys(0, max(0, row.num_prefill - max(1, row.num_ahead)))
