"""A TCP connection from rank 0 to each other rank: signs of life, and wake-ups of ranks that have no work.

MLX's operations wait for ever for a rank that is gone or hangs, and they wait with a busy core. So every rank
that is ready sends a byte each second. A rank whose bytes stop for `timeout_s`, or whose connection ends, is
lost. Between requests the other ranks wait here, without a busy core, until rank 0 wakes them.

This module knows no model and no MLX. Rank 0 tells the others its address (`Address`) by a message.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from outrider.config import InvalidConfig

log = logging.getLogger(__name__)

PERIOD_S = 1.0  # between two signs of life, at most; chosen by hand
PERIODS = 10  # signs of life within a timeout, at least; chosen by hand
CONNECT_S = 30.0  # until all ranks are connected; chosen by hand
GREETING_S = 5.0  # for the first bytes of a connection; chosen by hand
ALIVE, WAKE, LEAVE = b".", b"w", b"q"
RANK_BYTES = 4


@dataclass(frozen=True)
class Address:
    """Where rank 0 waits for the other ranks."""

    host: str
    port: int
    token: str  # other programs that find the port do not know it

    def to_numbers(self) -> list[int]:
        return list(json.dumps([self.host, self.port, self.token]).encode())

    @classmethod
    def from_numbers(cls, numbers: list[int]) -> Address:
        return cls(*json.loads(bytes(numbers)))


def host_of_rank_0(environ: Mapping[str, str] = os.environ) -> str:
    """The address of rank 0 by which MLX reaches it too."""
    for name in ("MLX_JACCL_COORDINATOR", "NCCL_HOST_IP"):
        if text := environ.get(name):
            return text.split(":")[0]
    with suppress(KeyError, OSError, ValueError, LookupError):
        first: str = json.loads(Path(environ["MLX_HOSTFILE"]).read_text())[0][0]
        return first.rpartition(":")[0]
    return socket.gethostname()


# -- connecting ------------------------------------------------------------------------------------------


class Meeting:
    """Rank 0's side of the start: listens until every other rank has connected."""

    def __init__(self, host: str) -> None:
        try:
            self._listener = socket.create_server((host, 0))
        except OSError as error:
            raise InvalidConfig(
                f"rank 0 cannot listen on its address {host} for the other ranks: {error}"
            ) from None
        self.address = Address(host, self._listener.getsockname()[1], secrets.token_hex(16))

    def connections(self, num_ranks: int, timeout_s: float = CONNECT_S) -> dict[int, socket.socket]:
        """By rank. Raises InvalidConfig if a rank does not come."""
        found: dict[int, socket.socket] = {}
        end_s = time.monotonic() + timeout_s
        with self._listener:
            while len(found) < num_ranks - 1:
                self._listener.settimeout(max(0.01, end_s - time.monotonic()))
                try:
                    connection, _ = self._listener.accept()
                except TimeoutError:
                    missing = sorted(set(range(1, num_ranks)) - set(found))
                    raise InvalidConfig(
                        f"ranks {missing} have not connected to {self.address.host}:{self.address.port} "
                        f"within {timeout_s:g} s: is a firewall in between?"
                    ) from None
                rank = self._greeted(connection)
                if rank is None or not 0 < rank < num_ranks or rank in found:
                    connection.close()
                else:
                    found[rank] = connection
        return found

    def _greeted(self, connection: socket.socket) -> int | None:
        """The rank that has connected; None if it is no rank of this group."""
        token = self.address.token.encode()
        connection.settimeout(GREETING_S)
        try:
            greeting = connection.recv(len(token) + RANK_BYTES, socket.MSG_WAITALL)
        except OSError:
            return None
        if not hmac.compare_digest(greeting[: len(token)], token):
            return None
        return int.from_bytes(greeting[len(token) :], "big")


def connect(address: Address, rank: int) -> dict[int, socket.socket]:
    """The connection of another rank to rank 0."""
    try:
        connection = socket.create_connection((address.host, address.port), CONNECT_S)
        connection.sendall(address.token.encode() + rank.to_bytes(RANK_BYTES, "big"))
    except OSError as error:
        raise InvalidConfig(
            f"rank {rank} cannot reach rank 0 at {address.host}:{address.port}: {error}"
        ) from None
    return {0: connection}


# -- connected -------------------------------------------------------------------------------------------


@dataclass
class Peer:
    rank: int
    connection: socket.socket
    is_ready: bool = False  # it has sent a sign of life
    has_left: bool = False  # it ends as planned
    silent_s: float = 0.0  # as this process saw it


@dataclass
class RankLinks:
    connections: Mapping[int, socket.socket]  # by rank
    timeout_s: float  # 0: only the end of a connection is a loss
    on_loss: Callable[[str], None]  # called on the thread of the links
    report_alive: Callable[[], None] = lambda: None  # called there each second, once this rank is ready
    _peers: list[Peer] = field(default_factory=list)
    _is_ready: bool = False
    _wakeups: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def __post_init__(self) -> None:
        self.period_s = min(PERIOD_S, self.timeout_s / PERIODS) if self.timeout_s else PERIOD_S
        for rank, connection in self.connections.items():
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._peers.append(Peer(rank, connection))
        self._thread = threading.Thread(target=self._run, name="outrider-rank-links", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """This rank has loaded its model: from now on it sends signs of life, and expects those of others.

        (Native code that loads a model may keep Python's lock for long.)
        """
        if not self._is_ready:
            self._is_ready = True
            for peer in self._peers:
                self._show_life(peer)

    def wake(self) -> None:
        """Rank 0: a message comes. Every call ends one `wait` on every other rank."""
        for peer in self._peers:
            with suppress(OSError):  # the thread of the links notices the loss
                peer.connection.sendall(WAKE)

    def wait(self) -> None:
        """Another rank: until rank 0 wakes it."""
        self.begin()
        self._wakeups.acquire()

    def leave(self) -> None:
        """Another rank ends as planned, and says so to rank 0. No loss is reported from now on.

        The thread of the links ends, so that the connections may be closed.
        """
        for peer in self._peers:
            peer.has_left = True
            with suppress(OSError):
                peer.connection.sendall(LEAVE)
            with suppress(OSError):
                peer.connection.shutdown(socket.SHUT_RD)  # ends the thread's wait
        self._thread.join()

    # -- on the thread of the links ----------------------------------------------------------------------

    def _run(self) -> None:
        looked_s = time.monotonic()
        while peers := [peer for peer in self._peers if not peer.has_left]:
            readable, _, _ = select.select([peer.connection for peer in peers], (), (), self.period_s)
            for peer in peers:
                if peer.connection in readable:
                    self._read(peer)
            now_s = time.monotonic()
            if now_s - looked_s < self.period_s:
                continue
            # Two periods at most: this process itself may have been stopped, or have got no CPU.
            passed_s, looked_s = min(now_s - looked_s, 2 * self.period_s), now_s
            if self._is_ready:
                self.report_alive()
            for peer in peers:
                self._look(peer, passed_s)

    def _read(self, peer: Peer) -> None:
        try:
            data = peer.connection.recv(4096, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if LEAVE in data:
            peer.has_left = True
        elif not data and not peer.has_left:
            peer.has_left = True
            self.on_loss(f"rank {peer.rank} of this model is gone")
        if num_wakeups := data.count(WAKE):
            self._wakeups.release(num_wakeups)
        peer.is_ready = peer.is_ready or ALIVE in data
        peer.silent_s = 0.0

    def _look(self, peer: Peer, passed_s: float) -> None:
        if not self._is_ready or peer.has_left:
            return
        self._show_life(peer)
        peer.silent_s += passed_s if peer.is_ready else 0.0
        if 0 < self.timeout_s < peer.silent_s:
            peer.has_left = True
            self.on_loss(
                f"rank {peer.rank} of this model has shown no sign of life for {peer.silent_s:.0f} s "
                "(--rank-timeout)"
            )

    def _show_life(self, peer: Peer) -> None:
        with suppress(OSError):  # a full buffer: the peer is stopped. A broken one: `_read` notices it
            peer.connection.send(ALIVE, socket.MSG_DONTWAIT)
