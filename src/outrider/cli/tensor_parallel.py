"""The ranks of `outrider serve`: joined by mlx.launch, or started here on this machine.

    mlx.launch --hostfile hosts.json -- outrider serve MODEL     one rank on each host of the file
    outrider serve MODEL --tensor-parallel N                     N ranks on this machine

All ranks run the same command. Rank 0 serves; the others follow it (step/follower.py). MLX's operations wait
for ever if a rank is gone or hangs. So each rank watches the others (cli/rank_links.py), and all end if one
is lost. Then all are started again: with --tensor-parallel by rank 0's supervisor, under mlx.launch by one
supervisor each.
"""

from __future__ import annotations

import faulthandler
import importlib.metadata
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.cli.model_specs import ModelSpec, model_specs
from outrider.cli.serve_options import OPTIONS
from outrider.cli.worker import BAD_SETTING, ENGINE_FAILED
from outrider.config import InvalidConfig
from outrider.cpu.threads import THREAD_VARIABLES, usable_cpus

if TYPE_CHECKING:
    from outrider.cli.rank_links import RankLinks
    from outrider.step.ranks import Ranks

log = logging.getLogger(__name__)

FIRST_RANK = "OUTRIDER_FIRST_RANK"  # the descriptor by which a started rank notices that rank 0 is gone
MAX_RANKS = 64
JOIN_S = 180.0  # until all ranks have met: then the process ends, and is started again; chosen by hand
LAST_WORDS_S = 2.0  # from the loss of a rank until this process ends: clients are told meanwhile
ON_ONE_RANK = {  # options that need a model on one rank, and what to do on several
    "adapter": "Name it in --adapters NAME=DIR and in the requests.",
    "adapters_dir": "All ranks load their adapters at the start: name them in --adapters NAME=DIR.",
    "draft_model": "Draft with an MTP head (--head) or with --drafter ngram.",
    "spec_prefill_model": "Leave it out: prompts are read in full.",
    "memory_limit": "Limit the KV caches with --memory-budget.",
    "idle_unload": "Leave it out: the model stays loaded.",
}


def own_rank() -> int | None:
    """The rank that mlx.launch or rank 0 has given this process; None: it is not one of several."""
    text = os.environ.get("MLX_RANK")
    return int(text) if text is not None and text.isdigit() else None


def is_started_by_rank_0() -> bool:
    """True for a rank of --tensor-parallel other than 0: rank 0's supervisor starts it again too."""
    return FIRST_RANK in os.environ


def is_on_ranks(options: Mapping[str, Any]) -> bool:
    return (options["tensor_parallel"] or 1) > 1 or own_rank() is not None


def spec_of_ranks(options: dict[str, Any]) -> ModelSpec:
    """The one model of several ranks. Raises InvalidConfig for what several ranks do not have."""
    specs = model_specs(options)
    if len(specs) > 1:
        names = ", ".join(spec.name for spec in specs)
        raise InvalidConfig(f"several ranks serve one model, not {len(specs)} ({names}): name one of them")
    for key, instead in ON_ONE_RANK.items():
        if specs[0].options[key]:
            raise InvalidConfig(f"{OPTIONS[key].flag} cannot be used on several ranks. {instead}")
    return specs[0]


def shared_cores(num_ranks: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables for ranks that share the cores of a Linux machine, unless the user has set one.

    A rank that waits for another one keeps a core busy. So ranks with a thread for every core would keep
    taking cores from each other.
    """
    if sys.platform != "linux" or any(name in environ for name in THREAD_VARIABLES):
        return {}
    return {THREAD_VARIABLES[0]: str(max(1, usable_cpus() // num_ranks))}


class OtherRanks:
    """The other ranks, for this one: their processes, if it has started them, and their loss."""

    def __init__(self) -> None:
        self.on_loss: Callable[[str], None] | None = None  # tells the clients; None: there are none
        self.report_alive: Callable[[], None] = lambda: None  # called each second while this rank works
        self.links: RankLinks | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._is_lost = threading.Lock()

    def start(self, num_ranks: int, command: Sequence[str]) -> Path:
        """Start ranks 1 to num_ranks - 1, and become rank 0. Returns the file with the ranks' addresses."""
        if not 1 <= num_ranks <= MAX_RANKS:
            raise InvalidConfig(f"--tensor-parallel must be 1 to {MAX_RANKS}, not {num_ranks}")
        import tempfile  # here: the supervisor is to stay small

        with tempfile.NamedTemporaryFile("w", prefix="outrider-", suffix=".json", delete=False) as file:
            json.dump([[f"127.0.0.1:{port}"] for port in _free_ports(num_ranks)], file)
        os.environ |= {"MLX_RANK": "0", "MLX_HOSTFILE": file.name, **shared_cores(num_ranks, os.environ)}
        read_end, _ = os.pipe()  # its other end closes when this process ends, however it ends
        for rank in range(1, num_ranks):
            process = subprocess.Popen(
                [sys.executable, *command],
                env={**os.environ, "MLX_RANK": str(rank), FIRST_RANK: str(read_end)},
                pass_fds=(read_end,),
                stdin=subprocess.DEVNULL,
            )
            self._processes.append(process)
            name = f"outrider-rank-{rank}"
            threading.Thread(target=self._watch, args=(process, rank), name=name, daemon=True).start()
        os.close(read_end)
        return Path(file.name)

    def _watch(self, process: subprocess.Popen[bytes], rank: int) -> None:
        status = process.wait()
        if status == BAD_SETTING:  # the rank has said what to change
            self.lose(f"rank {rank} refuses to start", BAD_SETTING)
        elif status != 0:
            self.lose(f"rank {rank} of this model has ended with status {status}")

    def lose(self, reason: str, status: int = ENGINE_FAILED) -> None:
        """End this process and the ranks that it has started: the next operation would wait for ever."""
        if not self._is_lost.acquire(blocking=False):
            return
        log.error("%s: all ranks end", reason)
        if self.on_loss is not None:
            self.on_loss(reason)
            time.sleep(LAST_WORDS_S)
        self.end_process(status)

    def end_process(self, status: int) -> None:
        """End this process at once. A rank that is stopped would not notice it, and is killed."""
        for process in self._processes:
            process.kill()
        os._exit(status)

    def begin(self) -> None:
        """This rank is ready: the others have to show signs of life from now on."""
        if self.links is not None:
            self.links.begin()

    def leave(self) -> None:
        """This rank, which is not rank 0, ends as planned."""
        if self.links is not None:
            self.links.leave()


def join(num_ranks: int | None, timeout_s: float, command: Sequence[str], others: OtherRanks) -> Ranks | None:
    """The ranks of this process's group; None if it serves alone.

    `num_ranks`: of --tensor-parallel. `timeout_s`: after which a silent rank is lost. `command`: of this
    process; the other ranks are started with it.
    """
    hostfile: Path | None = None
    if own_rank() is None:
        if num_ranks is None or num_ranks == 1:
            return None
        hostfile = others.start(num_ranks, command)
    import mlx.core as mx

    from outrider.cli.rank_links import RankLinks
    from outrider.step.ranks import Ranks

    if FIRST_RANK in os.environ:
        _end_with_rank_0(int(os.environ.pop(FIRST_RANK)))
    # MLX waits for ever for a rank that has gone meanwhile, and may keep Python's lock.
    faulthandler.dump_traceback_later(JOIN_S, exit=True)
    try:
        ranks = Ranks(mx.distributed.init(strict=True))
    except RuntimeError as error:
        raise InvalidConfig(f"rank {own_rank()} could not join the others: {error}") from None
    if num_ranks is not None and ranks.size != num_ranks:
        raise InvalidConfig(
            f"--tensor-parallel {num_ranks}, but mlx.launch has started {ranks.size} processes: leave it out"
        )
    ranks.check_same(_versions())
    others.links = ranks.signals = RankLinks(_connections(ranks), timeout_s, others.lose, others.report_alive)
    faulthandler.cancel_dump_traceback_later()
    if hostfile is not None:
        hostfile.unlink()  # all ranks have read it
    return ranks


def _versions() -> dict[str, str]:
    """What has to be the same on all ranks before their messages can be understood."""
    from outrider import __version__
    from outrider.step import step_message

    names = ("mlx", "mlx-lm")
    return {
        "Outrider": __version__,
        "messages": str(step_message.VERSION),
        **{name: importlib.metadata.version(name) for name in names},
    }


def _connections(ranks: Ranks) -> dict[int, socket.socket]:
    from outrider.cli.rank_links import Address, Meeting, connect, host_of_rank_0

    if ranks.rank > 0:
        return connect(Address.from_numbers(ranks.receive().tolist()), ranks.rank)
    meeting = Meeting(host_of_rank_0())
    ranks.send(meeting.address.to_numbers())
    return meeting.connections(ranks.size)


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
