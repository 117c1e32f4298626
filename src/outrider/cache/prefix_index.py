"""Which prefixes are cached: a radix tree of blocks, its bytes and who goes first. Pure Python, no MLX.

A tree's edges are blocks of `block_size` cells, aligned, so that one text has one chain of blocks:

    cells   0 ........ 63 | 64 ........ 127 | 128 ... 150
    nodes   full block    | full block      | tail            (a shorter block; always a leaf)
    state        after 64 |                 |                 (recurrent layers: at ends of full blocks only)

The index knows keys and sizes, never the data: a node has a `block_id`, and whoever holds the data is told by
`take_dropped` which ids to let go. A key stands for what went into a cell: a token id, or a number made from
a picture (`media_keys`), or from a token and the next one (`pair_key`: an MTP head's cells). Every tree has a
name, so that who does not know the name finds nothing in it.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

BLOCK_SIZE = 64  # cells: a copy every 64 decoded tokens, files of a few MB; hits are not rounded to it

Keys = tuple[int, ...]


def media_keys(digest: bytes, num_cells: int) -> list[int]:
    """Keys of the cells that one picture fills: never a token id, and never those of another picture."""
    return [
        -1 - int.from_bytes(hashlib.sha256(b"%d/" % cell + digest).digest()[:16], "big")
        for cell in range(num_cells)
    ]


def pair_key(key: int, next_key: int) -> int:
    """The key of a cell that was made from two tokens."""
    if key >= 0 and next_key >= 0:
        return key << 32 | next_key
    return -1 - int.from_bytes(hashlib.sha256(b"%d/%d" % (key, next_key)).digest()[:16], "big")


class Node:
    """A cached block. It is alive as long as the index holds it; its parents live at least as long."""

    __slots__ = (
        "block_id", "children", "digest", "is_alive", "keys", "num_head_cached", "order", "parent", "refs",
        "state_id",
    )  # fmt: skip

    def __init__(
        self, parent: Node | None, keys: Keys, digest: bytes, block_id: int, num_head_cached: int = 0
    ) -> None:
        self.parent = parent
        self.keys = keys
        self.digest = digest  # of all keys from the root: the block's name outside this process
        self.block_id = block_id
        self.num_head_cached = (
            num_head_cached  # of its cells, those that the head was fed; it may have rested then
        )
        self.state_id: int | None = None  # the recurrent layers' state after the block's last cell
        self.children: dict[Keys, Node] = {}
        self.order: list[Keys] = []  # the children's keys, sorted: the nearest are neighbours
        self.refs = 0
        self.is_alive = True

    @property
    def is_headed(self) -> bool:
        return self.num_head_cached == len(self.keys)

    def child_like(self, keys: Keys) -> tuple[Node | None, int]:
        """The child that shares most with `keys`, and how many keys those are."""
        child = self.children.get(keys)
        if child is not None:
            return child, len(keys)
        place = bisect_left(self.order, keys)
        near = self.order[max(0, place - 1) : place + 1]
        best = max(near, key=lambda own: num_common(own, keys), default=())
        num = num_common(best, keys)
        return (self.children[best], num) if num else (None, 0)


@dataclass(frozen=True)
class Match:
    """The longest cached prefix of some keys: full blocks from the root on, and a part of one more."""

    nodes: tuple[Node, ...] = ()
    num_keys: int = 0


class PrefixIndex:
    """Owns the trees and the books: `num_bytes` never exceeds the budget."""

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
        self.num_evicted = 0  # blocks that gave way to others, ever
        self._bytes_per_cell = bytes_per_cell
        self._bytes_per_state = bytes_per_state
        self._roots: dict[str, Node] = {}
        self._by_age: OrderedDict[int, Node] = (
            OrderedDict()
        )  # oldest first, and children before their parents
        self._dropped: list[int] = []
        self._last_id = 0

    @property
    def num_blocks(self) -> int:
        return len(self._by_age)

    def root(self, name: str) -> Node:
        """The tree of this name, which has no cells of its own."""
        if name not in self._roots:
            self._roots[name] = Node(None, (), hashlib.sha256(name.encode()).digest(), 0)
        return self._roots[name]

    def forget_if_empty(self, name: str) -> None:
        """Nobody grows this tree now: a name alone is not worth keeping, since clients make them up."""
        root = self._roots.get(name)
        if root is not None and not root.children and not root.refs:
            self._forget_root(root)

    def match(self, name: str, keys: Sequence[int]) -> Match:
        """The longest cached prefix; using it is a reason to keep it."""
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
        return Match(tuple(nodes), num)

    def child(self, parent: Node, keys: Keys) -> Node | None:
        """The block that holds all these keys behind `parent`, if there is one."""
        node, num = parent.child_like(keys)
        return node if num == len(keys) else None

    def insert(self, parent: Node, keys: Keys, num_head_cached: int | None = None) -> Node | None:
        """A new block behind `parent`; older ones give way. None when there is no room.

        `num_head_cached`: where the head was not fed all of it. A tail that it begins with has had its day.
        """
        assert parent.is_alive and 0 < len(keys) <= self.block_size and keys not in parent.children
        assert len(parent.keys) in (0, self.block_size), "nothing comes after a tail"
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
        """The block's data will be replaced by those of a row whose head was fed more of it."""
        del self._by_age[node.block_id]
        self._dropped.append(node.block_id)
        node.block_id, node.num_head_cached = self._new_id(), num_head_cached
        self._by_age[node.block_id] = node
        self.touch(node)

    def add_state(self, node: Node) -> int | None:
        """Room for the state after a full block: its id; None when there is no room, or one there already."""
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
        """Keep a block, and so its parents, until it is released as often."""
        node.refs += 1

    def release(self, node: Node) -> None:
        assert node.refs > 0
        node.refs -= 1

    def touch(self, node: Node) -> None:
        """This block and its parents were used now. (Parents last: they are never older than a child.)"""
        for used in path_up(node):
            self._by_age.move_to_end(used.block_id)

    def clear(self) -> None:
        """Forget everything, held or not."""
        for node in list(self._by_age.values()):
            self._remove(node)
        for root in self._roots.values():
            root.is_alive = False
        self._roots.clear()

    @property
    def has_dropped(self) -> bool:
        return bool(self._dropped)

    def take_dropped(self) -> list[int]:
        """Ids of blocks and states that are gone since the last call."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def check_integrity(self) -> None:
        """Raise if the books do not balance."""
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
        """Let the least recently used leaves go, but for those that are held, until so many bytes fit."""
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
    """How many keys the two begin with in common."""
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
