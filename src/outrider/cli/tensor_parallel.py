"""The ranks of `outrider serve`: joined by mlx.launch, or started here on this machine.

    mlx.launch --hostfile hosts.json -- outrider serve MODEL     one rank on each host of the file
    outrider serve MODEL --tensor-parallel N                     N ranks on this machine

All ranks run the same command. Rank 0 serves; the others follow it (step/follower.py). MLX's operations wait
for ever if a rank is gone. So on this machine each rank watches the others' processes and ends with them; the
supervisor then starts all of them again. (mlx.launch ends all ranks when one has ended.)
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.cli.worker import ENGINE_FAILED
from outrider.config import InvalidConfig

if TYPE_CHECKING:
    from outrider.step.ranks import Ranks

log = logging.getLogger(__name__)

FIRST_RANK = "OUTRIDER_FIRST_RANK"  # the descriptor by which a started rank notices that rank 0 is gone
MAX_RANKS = 64
LAST_WORDS_S = 2.0  # from the loss of a rank until this process ends: clients are told meanwhile


def own_rank() -> int | None:
    """The rank that mlx.launch or rank 0 has given this process; None: it is not one of several."""
    text = os.environ.get("MLX_RANK")
    return int(text) if text is not None and text.isdigit() else None


class OtherRanks:
    """The processes of the other ranks, if this one has started them."""

    def __init__(self) -> None:
        self.on_loss: Callable[[str], None] = lambda reason: None  # called when one has ended too early

    def start(self, num_ranks: int, command: Sequence[str]) -> Path:
        """Start ranks 1 to num_ranks - 1, and become rank 0. Returns the file with the ranks' addresses."""
        if not 1 <= num_ranks <= MAX_RANKS:
            raise InvalidConfig(f"--tensor-parallel must be 1 to {MAX_RANKS}, not {num_ranks}")
        import tempfile  # here: the supervisor is to stay small

        with tempfile.NamedTemporaryFile("w", prefix="outrider-", suffix=".json", delete=False) as file:
            json.dump([[f"127.0.0.1:{port}"] for port in _free_ports(num_ranks)], file)
        os.environ |= {"MLX_RANK": "0", "MLX_HOSTFILE": file.name}
        read_end, _ = os.pipe()  # its other end closes when this process ends, however it ends
        for rank in range(1, num_ranks):
            process = subprocess.Popen(
                [sys.executable, *command],
                env={**os.environ, "MLX_RANK": str(rank), FIRST_RANK: str(read_end)},
                pass_fds=(read_end,),
                stdin=subprocess.DEVNULL,
            )
            name = f"outrider-rank-{rank}"
            threading.Thread(target=self._watch, args=(process, rank), name=name, daemon=True).start()
        os.close(read_end)
        return Path(file.name)

    def _watch(self, process: subprocess.Popen[bytes], rank: int) -> None:
        """End this process when another rank has ended: its next operation would wait for ever."""
        status = process.wait()
        if status != 0:
            log.error("rank %d has ended (status %d): all ranks end", rank, status)
            self.on_loss(f"rank {rank} of this model has ended")
            time.sleep(LAST_WORDS_S)
            os._exit(ENGINE_FAILED)


def join(num_ranks: int | None, command: Sequence[str], others: OtherRanks) -> Ranks | None:
    """The ranks of this process's group; None if it serves alone.

    `num_ranks`: of --tensor-parallel. `command`: of this process; the other ranks are started with it.
    """
    hostfile: Path | None = None
    if own_rank() is None:
        if num_ranks is None or num_ranks == 1:
            return None
        hostfile = others.start(num_ranks, command)
    import mlx.core as mx

    from outrider.step.ranks import Ranks

    if FIRST_RANK in os.environ:
        _end_with_rank_0(int(os.environ.pop(FIRST_RANK)))
    ranks = Ranks(mx.distributed.init(strict=True))
    if hostfile is not None:
        hostfile.unlink()  # all ranks have read it
    if num_ranks is not None and ranks.size != num_ranks:
        raise InvalidConfig(
            f"--tensor-parallel {num_ranks}, but mlx.launch has started {ranks.size} processes: leave it out"
        )
    return ranks


def _end_with_rank_0(descriptor: int) -> None:
    def watch() -> None:
        with suppress(OSError):
            while os.read(descriptor, 1):
                pass
        os._exit(ENGINE_FAILED)

    threading.Thread(target=watch, name="outrider-rank-0-gone", daemon=True).start()


def _free_ports(num: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(num)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
