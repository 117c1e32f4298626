"""How many threads a matmul gets: by the cores, the user's setting and what other processes use."""

import os
import sys
from pathlib import Path

import pytest

from outrider.cpu import threads as cpu_threads
from outrider.cpu.threads import RAISE_AFTER, ThreadCounts, ThreadWatch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux only: macOS has Accelerate")


def pretend(monkeypatch: pytest.MonkeyPatch, num_cpus: int, num_cores: int | None) -> None:
    monkeypatch.setattr(cpu_threads, "usable_cpus", lambda: num_cpus)
    monkeypatch.setattr(cpu_threads, "physical_cores", lambda cpus, sysfs: num_cores)


@pytest.mark.parametrize(
    ("num_cpus", "num_cores", "threads"),
    [
        (1, 1, ThreadCounts(1, 1)),
        (2, 2, ThreadCounts(1, 2)),
        (2, 1, ThreadCounts(1, 1)),
        (3, 3, ThreadCounts(1, 3)),
        (16, 8, ThreadCounts(8, 8)),
        (4, 64, ThreadCounts(2, 4)),  # a container's quota
        (128, 64, ThreadCounts(8, 8)),
        (2, None, ThreadCounts(1, 1)),
        (4, None, ThreadCounts(2, 2)),
    ],
)
def test_half_of_the_cpus_at_first_and_all_cores_while_they_are_free(
    num_cpus: int, num_cores: int | None, threads: ThreadCounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, num_cpus, num_cores)
    assert cpu_threads.thread_counts({}) == threads


@pytest.mark.parametrize(
    ("environ", "threads"),
    [
        ({"OUTRIDER_BLAS_THREADS": "3", "OPENBLAS_NUM_THREADS": "6", "OMP_NUM_THREADS": "7"}, 3),
        ({"OPENBLAS_NUM_THREADS": "6", "OMP_NUM_THREADS": "7"}, 6),
        ({"OMP_NUM_THREADS": "7"}, 7),
        ({"OUTRIDER_BLAS_THREADS": "", "OMP_NUM_THREADS": " 1 "}, 1),
        ({"OUTRIDER_BLAS_THREADS": "99"}, 8),
    ],
)
def test_the_nearest_variable_decides_the_threads_for_good(
    environ: dict[str, str], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, 8, 8)
    assert cpu_threads.thread_counts(environ) == ThreadCounts(threads, threads)


@pytest.mark.parametrize("value", ["0", "-2", "two", "1.5", "2;ls", "9" * 40])
def test_a_bad_thread_count_is_logged_and_ignored(
    value: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pretend(monkeypatch, 8, 8)
    environ = {"OUTRIDER_BLAS_THREADS": value, "OMP_NUM_THREADS": "3"}
    assert cpu_threads.thread_counts(environ) == ThreadCounts(3, 3)
    assert "OUTRIDER_BLAS_THREADS" in caplog.text


@pytest.mark.parametrize(
    ("line", "num_cpus"),
    [("200000 100000", 2), ("50000 100000", 1), ("max 100000", sys.maxsize), ("nonsense", sys.maxsize)],
)
def test_a_container_quota_counts_in_whole_cpus(line: str, num_cpus: int, tmp_path: Path) -> None:
    cpu_max = tmp_path / "cpu.max"
    cpu_max.write_text(line + "\n")
    assert cpu_threads.cpu_quota(cpu_max) == num_cpus
    assert cpu_threads.cpu_quota(tmp_path / "absent") == sys.maxsize


def test_cpus_that_share_a_core_count_once(tmp_path: Path) -> None:
    for cpu, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(siblings + "\n")
    assert cpu_threads.physical_cores({0, 1, 2, 3}, tmp_path) == 2
    assert cpu_threads.physical_cores({0, 1}, tmp_path) == 2
    assert cpu_threads.physical_cores({0, 2}, tmp_path) == 1
    assert cpu_threads.physical_cores({0, 9}, tmp_path) is None


def test_busy_time_is_read_for_this_processs_cpus_only() -> None:
    lines = [
        "cpu  9 9 9 9 9 9 9 9 0 0",
        "cpu0 10 2 3 500 70 1 1 3 0 0",
        "cpu1 80 0 0 9 0 0 0 0 0 0",
        "intr 5 1",
    ]
    stat = "\n".join(lines)
    per_second = os.sysconf("SC_CLK_TCK")
    assert cpu_threads.busy_seconds(stat, {0}) == 20 / per_second
    assert cpu_threads.busy_seconds(stat, {0, 1}) == 100 / per_second


class Machine:
    """Clocks of a machine on which others use `others` CPUs and this process `own`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_cpus: int) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(num_cpus)))
        self.now_s = self.busy_s = self.own_s = 0.0
        self.set: list[int] = []

    def watch(self, threads: ThreadCounts) -> ThreadWatch:
        return ThreadWatch(
            threads, self.set.append, lambda: self.busy_s, lambda: self.own_s, lambda: self.now_s
        )

    def run(self, watch: ThreadWatch, samples: int, own: float, others: float) -> list[int]:
        """The numbers of threads that the watch sets meanwhile."""
        self.set.clear()
        for _ in range(samples):
            self.now_s += 0.1
            self.own_s += 0.1 * own
            self.busy_s += 0.1 * (own + others)
            watch.sample()
        return list(self.set)


def test_free_cores_are_taken_after_a_while_and_given_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 2)
    watch = machine.watch(ThreadCounts(1, 2))
    assert machine.run(watch, RAISE_AFTER - 1, own=1.0, others=0.1) == []
    assert machine.run(watch, 1, own=1.0, others=0.1) == [2]
    assert machine.run(watch, 10, own=2.0, others=0.0) == []
    assert machine.run(watch, 1, own=1.33, others=0.67) == [1]  # three that run on two cores
    assert machine.run(watch, 20, own=1.0, others=1.0) == []
    assert machine.run(watch, RAISE_AFTER, own=1.0, others=0.0) == [2]


def test_a_core_that_is_free_now_and_then_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 2)
    watch = machine.watch(ThreadCounts(1, 2))
    for _ in range(5):
        assert machine.run(watch, RAISE_AFTER - 1, own=1.0, others=0.0) == []
        assert machine.run(watch, 1, own=1.0, others=0.9) == []


@pytest.mark.parametrize(("others", "threads"), [(0.0, 4), (0.9, 3), (1.9, 2), (3.0, 1), (40.0, 1)])
def test_as_many_threads_as_others_leave_cores(
    others: float, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch, 4)
    machine.run(watch := machine.watch(ThreadCounts(4, 4)), 2 * RAISE_AFTER, own=2.0, others=others)
    assert machine.set == ([threads] if threads < 4 else [])
    assert watch.is_idle is False


def test_an_idle_process_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 2)
    watch = machine.watch(ThreadCounts(1, 2))
    machine.run(watch, 1, own=0.0, others=0.5)
    assert watch.is_idle
