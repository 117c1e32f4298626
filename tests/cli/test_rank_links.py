"""The connections between ranks, with real processes that are killed, stopped and continued."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from outrider.cli import rank_links
from outrider.cli.rank_links import Address, Meeting, RankLinks, connect, host_of_rank_0
from outrider.cli.serve import _silence_timeout_s
from outrider.config import InvalidConfig
from patience import PATIENCE_S, wait_until

# A thread of links that fails would only be a warning, and its ranks would not be watched any more.
pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")

PROGRAM = Path(__file__).with_name("rank_program.py")
SHORT_S, LONG_S = (
    3.0,
    120.0,
)  # timeouts: for a rank that hangs; if none is to be lost, however busy the machine is


class RankProcess:
    def __init__(self, stack: ExitStack, rank: int, timeout_s: float, *address: str) -> None:
        command = [sys.executable, str(PROGRAM), str(rank), "3", str(timeout_s), *address]
        self.process = stack.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        stack.callback(self.process.kill)

    def read(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def tell(self, command: str) -> None:
        assert self.process.stdin is not None
        print(command, file=self.process.stdin, flush=True)
        assert self.read() == "done"

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def is_busy(self, for_s: float) -> bool:
        """True if it took more than a third of a core meanwhile."""
        before, began = self._cpu_s(), time.monotonic()
        time.sleep(for_s)
        return self._cpu_s() - before > (time.monotonic() - began) / 3

    def _cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def three_ranks(timeout_s: float) -> Iterator[list[RankProcess]]:
    """All of them are ready."""
    with ExitStack() as stack:
        first = RankProcess(stack, 0, timeout_s)
        address = first.read()
        ranks = [first, *(RankProcess(stack, rank, timeout_s, *address) for rank in (1, 2))]
        assert first.read() == "connected"
        first.tell("begin")
        wake(ranks)
        yield ranks


def wake(ranks: list[RankProcess]) -> None:
    ranks[0].tell("wake")
    assert [rank.read() for rank in ranks[1:]] == ["awake", "awake"]


def test_ranks_that_stop_for_a_short_time_go_on_and_keep_no_core_busy() -> None:
    with three_ranks(LONG_S) as ranks:
        wake(ranks)
        for rank in ranks:
            rank.stop()
            time.sleep(0.2)
            rank.go_on()
            wake(ranks)
        if Path("/proc").exists():
            assert not ranks[1].is_busy(for_s=0.3)


def test_all_ranks_end_when_one_is_killed() -> None:
    with three_ranks(LONG_S) as ranks:
        ranks[2].process.kill()
        assert ranks[0].read() == "rank 2 of this model is gone"
        assert ranks[1].read() == "rank 0 of this model is gone"
        assert [rank.process.wait(PATIENCE_S) for rank in ranks] == [70, 70, -signal.SIGKILL]


def test_all_ranks_end_when_one_hangs() -> None:
    with three_ranks(SHORT_S) as ranks:
        ranks[1].stop()
        assert ranks[0].read().startswith("rank 1 of this model has shown no sign of life for")
        assert ranks[2].read() == "rank 0 of this model is gone"
        assert [ranks[0].process.wait(PATIENCE_S), ranks[2].process.wait(PATIENCE_S)] == [70, 70]


def test_the_others_end_when_rank_0_hangs() -> None:
    with three_ranks(SHORT_S) as ranks:
        ranks[0].stop()
        for rank in ranks[1:]:
            assert rank.read().startswith("rank 0 of this model has shown no sign of life for")
            assert rank.process.wait(PATIENCE_S) == 70


# -- within one process ----------------------------------------------------------------------------------


@contextmanager
def linked(timeout_s: float, losses: list[str]) -> Iterator[tuple[RankLinks, RankLinks]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
    with client, server:
        first = RankLinks({1: server}, timeout_s, losses.append)
        other = RankLinks({0: client}, timeout_s, losses.append)
        yield first, other
        first.leave()
        other.leave()


def test_a_rank_that_still_loads_is_not_lost() -> None:
    losses: list[str] = []
    with linked(0.05, losses) as (first, _):
        first.begin()  # the other one has not begun, and sends nothing
        time.sleep(0.3)
        assert losses == []


def test_a_rank_that_leaves_is_not_lost() -> None:
    losses: list[str] = []
    with linked(2.0, losses) as (first, other):
        first.begin()
        other.begin()
        other.leave()
        assert not other._thread.is_alive()  # it reads the connection no more, which may be closed
        other.connections[0].close()
        wait_until(lambda: first._peers[0].has_left)
        assert losses == []


def test_a_stopped_process_does_not_count_the_time_of_its_own_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """After SIGCONT the clock has moved on, and the others were not silent."""
    losses: list[str] = []
    with linked(5.0, losses) as (first, other):
        first.begin()
        other.begin()
        wait_until(lambda: first._peers[0].is_ready)
        clock = time.monotonic
        with monkeypatch.context() as patch:
            patch.setattr(rank_links.time, "monotonic", lambda: clock() + 3600)
            time.sleep(1.5 * first.period_s)
        assert losses == []


def test_only_ranks_of_the_group_are_let_in() -> None:
    meeting, found = Meeting("127.0.0.1"), {}
    waiting = threading.Thread(target=lambda: found.update(meeting.connections(2)))
    waiting.start()
    stranger = connect(Address(meeting.address.host, meeting.address.port, "0" * 32), 1)[0]
    assert stranger.recv(1) == b""
    out_of_range = connect(meeting.address, 7)[0]
    assert out_of_range.recv(1) == b""
    connect(meeting.address, 1)[0].sendall(b".")
    waiting.join(PATIENCE_S)
    assert list(found) == [1]
    assert found[1].recv(1) == b"."


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(InvalidConfig, match=r"ranks \[1, 2\] have not connected .* firewall"):
        Meeting("127.0.0.1").connections(3, timeout_s=0.05)


def test_a_rank_that_cannot_reach_rank_0_says_where_it_tried() -> None:
    meeting = Meeting("127.0.0.1")
    meeting._listener.close()
    with pytest.raises(
        InvalidConfig, match=f"rank 2 cannot reach rank 0 at 127.0.0.1:{meeting.address.port}"
    ):
        connect(meeting.address, 2)


def test_the_address_passes_as_numbers() -> None:
    address = Address("10.0.0.1", 4711, "abc")
    assert Address.from_numbers(address.to_numbers()) == address


def test_rank_0_is_where_mlx_finds_it(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.json"
    hosts.write_text('[["10.0.0.1:5000", "10.0.1.1:5001"], ["10.0.0.2:5000"]]')
    assert host_of_rank_0({"MLX_HOSTFILE": str(hosts)}) == "10.0.0.1"
    assert host_of_rank_0({"MLX_JACCL_COORDINATOR": "10.0.0.3:32323"}) == "10.0.0.3"
    assert host_of_rank_0({"NCCL_HOST_IP": "10.0.0.4"}) == "10.0.0.4"
    assert host_of_rank_0({}) == socket.gethostname()


@pytest.mark.parametrize(
    ("step_s", "rank_s", "num_ranks", "limit_s"),
    [
        (60, 30, None, 60),
        (60, 30, 1, 60),
        (60, 30, 2, 30),
        (10, 30, 2, 10),
        (0, 30, 2, 30),
        (60, 0, 2, 60),
        (0, 0, 2, 0),
    ],
)
def test_rank_0_is_killed_when_the_other_ranks_have_given_it_up(
    step_s: float, rank_s: float, num_ranks: int | None, limit_s: float
) -> None:
    options = {"step_timeout": step_s, "rank_timeout": rank_s, "tensor_parallel": num_ranks}
    assert _silence_timeout_s(options) == limit_s
