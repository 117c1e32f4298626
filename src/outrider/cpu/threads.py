"""How many threads a matmul gets on a Linux CPU.

OpenBLAS splits a matmul evenly and spins until the last part is done. With a core for every thread this takes
a quarter to a third off a step. With one core too few, every matmul waits for the scheduler's next time
slice. In the matmul for few tokens (cpu/matmul.py) a thread takes the next part when it has a core, and the
caller waits only for parts that were started. A step of SmolLM2-135M on two cores, alone and beside busy
processes, in ms:

                                OpenBLAS                  cpu/matmul.py
                                alone   beside one        alone   beside one   beside two
    1 row         1 thread      64      73                28      39           56-95
                  2 threads     49      72-945            28      35           40-44
    8 rows        1 thread      95      103               43      53           114-119
                  2 threads     71      163-254           38      48           54-56
    8 rows x 4    1 thread      180     186               120     137          212-254
                  2 threads     122     227-4244          87      110          136-184

So a process starts with as many threads as half of its CPUs. While it serves, cpu/matmul.py gets as many
threads as there are cores. A `ThreadWatch` gives OpenBLAS as many as there are cores that no other process
uses; it checks ten times a second. The number of threads changes no bit of the results: never in
cpu/matmul.py, and in OpenBLAS's kernels for AVX-512 as long as the inner dimension is a multiple of 32, as it
is in models (`tests/cpu/test_blas.py`). In its kernels for AVX2 it may change last bits.

Nothing here may import mlx: cpu/blas.py has to run first.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger("outrider.cpu.blas")

THREAD_VARIABLES = ("OUTRIDER_BLAS_THREADS", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")
MAX_DEFAULT_THREADS = 8  # chosen by hand
SYSFS_CPUS = Path("/sys/devices/system/cpu")
CPU_TIMES = Path("/proc/stat")

# Chosen by hand:
WATCH_EVERY_S = 0.1
WATCH_IDLE_EVERY_S = 0.5  # while this process has nothing to do
IDLE_BELOW = 0.02  # share of one CPU's time that this process uses while it has nothing to do
SLACK_CPUS = 0.3  # CPUs that other processes may use before one more counts as taken
RAISE_AFTER = 5  # samples in a row that must call for more threads; fewer threads take effect at once


@dataclass(frozen=True)
class ThreadCounts:
    """How many threads a matmul has at first, and how many it may have while the other cores are free."""

    initial: int
    max: int


def thread_counts(environ: Mapping[str, str]) -> ThreadCounts:
    """The user's number, at most the number of CPUs. By default half of the CPUs up to all cores."""
    num_cpus = usable_cpus()
    for variable in THREAD_VARIABLES:
        value = environ.get(variable, "").strip()
        if re.fullmatch(r"0*[1-9]\d{0,5}", value):
            given = min(int(value), num_cpus)
            return ThreadCounts(given, given)
        if value:
            log.warning("%s=%r is not a number of threads; ignored", variable, value)
    half = max(1, min(num_cpus // 2, MAX_DEFAULT_THREADS))
    cores = physical_cores(os.sched_getaffinity(0), SYSFS_CPUS)
    if cores is None or not CPU_TIMES.is_file():  # the system does not report which cores are free
        return ThreadCounts(half, half)
    return ThreadCounts(half, max(1, min(cores, num_cpus, MAX_DEFAULT_THREADS)))


def usable_cpus() -> int:
    """The number of CPUs that this process may use, by its affinity and by its container's quota."""
    return max(1, min(len(os.sched_getaffinity(0)), cpu_quota(Path("/sys/fs/cgroup/cpu.max"))))


def cpu_quota(cgroup_file: Path) -> int:
    """Whole CPUs in a line like "200000 100000" (microseconds per period); a huge number when unlimited."""
    with suppress(OSError, ValueError):
        quota_us, period_us = cgroup_file.read_text().split()
        return max(1, int(quota_us) // int(period_us))
    return sys.maxsize


def physical_cores(cpus: Collection[int], sysfs: Path) -> int | None:
    """The number of cores of these CPUs; None if the system does not report which CPUs share a core."""
    try:
        siblings = (sysfs / f"cpu{cpu}" / "topology" / "thread_siblings_list" for cpu in cpus)
        return len({file.read_text().strip() for file in siblings})
    except OSError:
        return None


class ThreadWatch:
    """Sets the number of threads of a matmul to the number of CPUs that other processes leave free."""

    def __init__(
        self,
        threads: ThreadCounts,
        set_threads: Callable[[int], object],
        busy_s: Callable[[], float] | None = None,
        own_s: Callable[[], float] = time.process_time,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`busy_s`: CPU seconds of all processes on these CPUs so far; `own_s`: those of this process."""
        cpus = os.sched_getaffinity(0)
        self._num_cpus = len(cpus)
        self._max = threads.max
        self._now = self._initial = threads.initial
        self._set_threads = set_threads
        self._busy_s = busy_s or (lambda: busy_seconds(CPU_TIMES.read_text(), cpus))
        self._own_s, self._clock = own_s, clock
        self._num_higher = 0
        self._last = self._read()
        self.is_idle = True

    def start(self) -> None:
        threading.Thread(target=self._run, name="outrider-blas-threads", daemon=True).start()

    def sample(self) -> None:
        """Measure how much the other processes used since the last sample, and adapt."""
        before, self._last = self._last, self._read()
        wall, busy, own = (now - then for now, then in zip(self._last, before, strict=True))
        self.is_idle = own < IDLE_BELOW * wall
        others = max(0.0, busy - own) / max(wall, 1e-3)
        fitting = max(1, min(self._max, int(self._num_cpus - others + SLACK_CPUS)))
        self._num_higher = self._num_higher + 1 if fitting > self._now else 0
        if fitting < self._now or self._num_higher >= RAISE_AFTER:
            self._now, self._num_higher = fitting, 0
            self._set_threads(fitting)

    def _read(self) -> tuple[float, float, float]:
        return self._clock(), self._busy_s(), self._own_s()

    def _run(self) -> None:
        try:
            while True:
                time.sleep(WATCH_IDLE_EVERY_S if self.is_idle else WATCH_EVERY_S)
                self.sample()
        except (OSError, ValueError) as error:
            log.warning("BLAS: cannot see which cores are free; using %d threads: %s", self._initial, error)
            self._set_threads(self._initial)


def busy_seconds(stat: str, cpus: Collection[int]) -> float:
    """CPU seconds that all processes have spent on `cpus`, from the text of /proc/stat."""
    ticks = 0
    for line in stat.splitlines():
        name, *fields = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cpus:
            user, nice, system, _idle, _waiting, *others = (int(field) for field in fields[:8])
            ticks += user + nice + system + sum(others)
    return ticks / os.sysconf("SC_CLK_TCK")
