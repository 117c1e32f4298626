"""Which prefixes are cached: radix trees of blocks, their bytes, the order of eviction. Pure Python, no MLX.

A cell holds the keys and values of one token in every layer. A block holds up to `block_size` consecutive
cells. Blocks start at multiples of `block_size`, so one text always has the same chain of blocks:

    cells   0 ........ 63 | 64 ........ 127 | 128 ... 150
    nodes   full block    | full block      | tail            a tail is a shorter block and always a leaf
    states       after 64 |       after 128 |                 recurrent layers: at the end of some full blocks

Every cell has an integer key that names what the cell was computed from. Two cells with equal keys, behind
equal prefixes, are equal:

    a token id              0 <= id < 2**32      | 0 ...... 0 | id ....... |
    a token and the next    id << 32 | next_id   | id ....... | next_id .. |   an MTP head's cell (`pair_key`)
    a token of an image     -1 - (128-bit hash)  the image's own number (`PromptMedia.distinct_ids`)

The index knows keys and sizes, never the data. A node has a `block_id`; `take_dropped` returns the ids whose
data can be freed. Every tree has a name: a client that does not know the name (its cache salt) finds
nothing.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from outrider.plan import BLOCK_SIZE, BlockPiece

Keys = tuple[int, ...]


def pair_key(key: int, next_key: int) -> int:
    """The key of a cell that was computed from two tokens."""
    if key >= 0 and next_key >= 0:
        return key << 32 | next_key
    return -1 - int.from_bytes(hashlib.sha256(b"%d/%d" % (key, next_key)).digest()[:16], "big")


class Node:
    """A cached block, alive while the index holds it. A parent lives at least as long as its children."""

    __slots__ = (
        "block_id", "children", "digest", "is_alive", "keys", "num_head_cached", "order", "parent", "refs",
        "state_id",
    )  # fmt: skip

    def __init__(
        self, parent: Node | None, keys: Keys, digest: bytes, block_id: int, num_head_cached: int = 0
    ) -> None:
        self.parent = parent
        self.keys = keys
        self.digest = digest  # of all keys from the root on: names the block on disk
        self.block_id = block_id
        self.num_head_cached = num_head_cached  # leading cells that the head was fed; it may catch up later
        self.state_id: int | None = None  # the recurrent layers' state after the block's last cell
        self.children: dict[Keys, Node] = {}
        self.order: list[
            Keys
        ] = []  # the children's keys, sorted: keys with a long common start are neighbours
        self.refs = 0  # a block with references is not evicted
        self.is_alive = True

    @property
    def is_head_complete(self) -> bool:
        return self.num_head_cached == len(self.keys)

    def child_like(self, keys: Keys) -> tuple[Node | None, int]:
        """The child that begins with most of `keys`, and the number of those keys."""
        child = self.children.get(keys)
        if child is not None:
            return child, len(keys)
        place = bisect_left(self.order, keys)
        near = self.order[max(0, place - 1) : place + 1]
        best = max(near, key=lambda own: num_common(own, keys), default=())
        num = num_common(best, keys)
        return (self.children[best], num) if num else (None, 0)


@dataclass(frozen=True)
class PrefixMatch:
    """The longest cached prefix of some keys: blocks from the root on. The last one may match in part.

    A head that was paused has been fed only some of the blocks. The row's head can catch up later, but with
    one stretch of cells only. So a match is usable up to a block that the head was fed after a gap:

        head was fed       yes | yes | in part | no | yes
        num_loadable       ------------------------>|
        num_head_cached    -------------->|
        first_deferred                 ^ 2
    """

    nodes: tuple[Node, ...] = ()
    num_keys: int = 0
    block_size: int = BLOCK_SIZE

    @property
    def num_loadable(self) -> int:
        """Cells up to the first block that the head was fed after a gap."""
        first = self.first_deferred
        for number, node in enumerate(self.nodes[first + 1 :], first + 1):
            if node.num_head_cached:
                return number * self.block_size
        return self.num_keys

    @property
    def first_deferred(self) -> int:
        """The number of the first block that the head was not fed completely; else the number of blocks."""
        return next((i for i, node in enumerate(self.nodes) if not node.is_head_complete), len(self.nodes))

    def num_head_cached(self, num_cells: int) -> int:
        """Of the first `num_cells` cells, those that the head was fed."""
        first = self.first_deferred
        if first == len(self.nodes):
            return num_cells
        return min(num_cells, first * self.block_size + self.nodes[first].num_head_cached)

    def last_state(self, num_cells: int) -> int:
        """The last number of cells, up to `num_cells`, after which a recurrent state is cached; else 0."""
        ends = (i * self.block_size for i, node in enumerate(self.nodes, 1) if node.state_id is not None)
        return max((end for end in ends if end <= num_cells), default=0)

    def pieces(self, start: int, end: int) -> tuple[BlockPiece, ...]:
        """The parts of blocks that hold cells start..end-1."""
        found = []
        for number, node in enumerate(self.nodes):
            offset = number * self.block_size
            first, last = max(start - offset, 0), min(end - offset, self.block_size)
            if first < last:
                found.append(BlockPiece(node.block_id, first, last))
        return tuple(found)


class PrefixIndex:
    """Owns the trees and counts their bytes: `num_bytes` never exceeds the budget."""

    def __init__(
        self,
        budget_bytes: int,
        bytes_per_cell: int,
        bytes_per_state: int = 0,
        block_size: int = BLOCK_SIZE,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.block_size = block_size
        self.num_bytes = 0
        self.num_evicted = 0  # blocks evicted for others, since the start
        self._bytes_per_cell = bytes_per_cell
        self._bytes_per_state = bytes_per_state
        self._roots: dict[str, Node] = {}
        # Blocks by id, least recently used first. A child always comes before its parent.
        self._by_age: OrderedDict[int, Node] = OrderedDict()
        self._dropped: list[int] = []
        self._last_id = 0

    @property
    def num_blocks(self) -> int:
        return len(self._by_age)

    def root(self, name: str) -> Node:
        """The root of the tree with this name. A root holds no cells."""
        if name not in self._roots:
            self._roots[name] = Node(None, (), hashlib.sha256(name.encode()).digest(), 0)
        return self._roots[name]

    def forget_if_empty(self, name: str) -> None:
        """Forget a tree without blocks. Clients choose the names, so names must not accumulate."""
        root = self._roots.get(name)
        if root is not None and not root.children and not root.refs:
            self._forget_root(root)

    def match(self, name: str, keys: Sequence[int]) -> PrefixMatch:
        """The longest cached prefix of `keys`. Its blocks count as used now."""
        nodes: list[Node] = []
        node, num = self._roots.get(name), 0
        while node is not None and num < len(keys):
            node, num_more = node.child_like(tuple(keys[num : num + self.block_size]))
            if node is not None:
                nodes.append(node)
                num += num_more
                if num_more < self.block_size:
                    break
        if nodes:
            self.touch(nodes[-1])
        return PrefixMatch(tuple(nodes), num, self.block_size)

    def child(self, parent: Node, keys: Keys) -> Node | None:
        """The block behind `parent` that begins with all these keys."""
        node, num = parent.child_like(keys)
        return node if num == len(keys) else None

    def insert(self, parent: Node, keys: Keys, num_head_cached: int | None = None) -> Node | None:
        """Add a block behind `parent` and evict older ones for it. None if there is no room.

        `num_head_cached`: the leading cells that the head was fed; by default all. A tail whose keys the new
        block begins with is dropped.
        """
        assert parent.is_alive and 0 < len(keys) <= self.block_size and keys not in parent.children
        assert len(parent.keys) in (0, self.block_size), "a tail has no children"
        self.hold(parent)
        self._drop_tails(parent, keys)
        has_room = self._make_room(len(keys) * self._bytes_per_cell)
        self.release(parent)
        if not has_room:
            return None
        num_head_cached = len(keys) if num_head_cached is None else num_head_cached
        node = Node(parent, keys, chain_digest(parent.digest, keys), self._new_id(), num_head_cached)
        parent.children[keys] = node
        insort(parent.order, keys)
        self.num_bytes += len(keys) * self._bytes_per_cell
        self._by_age[node.block_id] = node
        self.touch(node)
        return node

    def renew(self, node: Node, num_head_cached: int) -> None:
        """Give a block a new id: its data is replaced by cells of which the head was fed more."""
        del self._by_age[node.block_id]
        self._dropped.append(node.block_id)
        node.block_id, node.num_head_cached = self._new_id(), num_head_cached
        self._by_age[node.block_id] = node
        self.touch(node)

    def add_state(self, node: Node) -> int | None:
        """Reserve room for the state after a full block. None if there is no room, or a state already."""
        assert node.is_alive and len(node.keys) == self.block_size
        if node.state_id is not None:
            return None
        self.hold(node)
        has_room = self._make_room(self._bytes_per_state)
        self.release(node)
        if not has_room:
            return None
        node.state_id = self._new_id()
        self.num_bytes += self._bytes_per_state
        return node.state_id

    def drop_state(self, node: Node) -> None:
        if node.state_id is not None:
            self._dropped.append(node.state_id)
            self.num_bytes -= self._bytes_per_state
            node.state_id = None

    def hold(self, node: Node) -> None:
        """Protect a block and its parents from eviction until `release` was called as often as `hold`."""
        node.refs += 1

    def release(self, node: Node) -> None:
        assert node.refs > 0
        node.refs -= 1

    def touch(self, node: Node) -> None:
        """Mark a block and its parents as used now. Parents come last: none is older than its child."""
        for used in path_up(node):
            self._by_age.move_to_end(used.block_id)

    def clear(self) -> None:
        """Drop all blocks, with or without references."""
        for node in list(self._by_age.values()):
            self._remove(node)
        for root in self._roots.values():
            root.is_alive = False
        self._roots.clear()

    @property
    def has_dropped(self) -> bool:
        return bool(self._dropped)

    def take_dropped(self) -> list[int]:
        """Ids of the blocks and states that were dropped since the last call."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def check_integrity(self) -> None:
        """Raise if the trees, the list of blocks and the counted bytes do not agree."""
        nodes = [node for root in self._roots.values() for node in _below(root)]
        num_bytes = sum(self._size(node) for node in nodes)
        if num_bytes != self.num_bytes or self.num_bytes > max(0, self.budget_bytes):
            raise AssertionError(
                f"{num_bytes} bytes cached, {self.num_bytes} accounted, {self.budget_bytes} allowed"
            )
        if {node.block_id for node in nodes} != set(self._by_age) or not all(node.is_alive for node in nodes):
            raise AssertionError("the trees and the list of blocks differ")
        ages = {block_id: age for age, block_id in enumerate(self._by_age)}
        for node in nodes:
            parent = node.parent
            assert parent is not None
            if parent.keys and ages[parent.block_id] < ages[node.block_id]:
                raise AssertionError("a parent is older than its child")
            if sorted(node.children) != node.order:
                raise AssertionError("a block's children are out of order")

    def _size(self, node: Node) -> int:
        state_bytes = 0 if node.state_id is None else self._bytes_per_state
        return len(node.keys) * self._bytes_per_cell + state_bytes

    def _new_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def _make_room(self, num_bytes: int) -> bool:
        """Evict the least recently used leaves that no row holds until `num_bytes` more fit."""
        if num_bytes > self.budget_bytes:
            return False
        while self.num_bytes + num_bytes > self.budget_bytes:
            oldest = next((n for n in self._by_age.values() if not n.children and not n.refs), None)
            if oldest is None:
                return False
            self._remove(oldest)
            self.num_evicted += 1
        return True

    def _drop_tails(self, parent: Node, keys: Keys) -> None:
        for num in range(1, len(keys)):
            tail = parent.children.get(keys[:num])
            if tail is not None and not tail.refs:
                self._remove(tail)

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        self.drop_state(node)
        self.num_bytes -= len(node.keys) * self._bytes_per_cell
        self._dropped.append(node.block_id)
        node.is_alive = False
        del self._by_age[node.block_id]
        del parent.children[node.keys]
        del parent.order[bisect_left(parent.order, node.keys)]
        if parent.parent is None and not parent.children and not parent.refs:
            self._forget_root(parent)

    def _forget_root(self, root: Node) -> None:
        root.is_alive = False
        self._roots = {name: other for name, other in self._roots.items() if other is not root}


def chain_digest(parent: bytes, keys: Keys) -> bytes:
    return hashlib.sha256(parent + ",".join(map(str, keys)).encode()).digest()


def num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of keys that both begin with."""
    shorter = min(len(one), len(other))
    if tuple(one[:shorter]) == tuple(other[:shorter]):
        return shorter
    return next(i for i in range(shorter) if one[i] != other[i])


def path_up(node: Node) -> Iterator[Node]:
    """The block and its parents, without the root."""
    while node.parent is not None:
        yield node
        node = node.parent


def _below(node: Node) -> Iterator[Node]:
    waiting = list(node.children.values())
    while waiting:
        one = waiting.pop()
        yield one
        waiting.extend(one.children.values())
