"""The threads of native/sgemm.c: they help, sleep, survive a fork, and change no bit."""

import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from outrider.cpu import matmul, threads
from own_sgemm import INSTRUCTIONS, WHERE_THEY_ARE, Sgemm, exit_code_of_a_child, loaded, numbers
from patience import PATIENCE_S, in_test_or_soak, measures_time, wait_until

pytestmark = WHERE_THEY_ARE


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compiled") / "sgemm.so"
    matmul._compile(path)
    return path


@pytest.fixture(params=INSTRUCTIONS)
def sgemm(request: pytest.FixtureRequest, compiled: Path, tmp_path: Path) -> Sgemm:
    """Each test has a file, so a library, so threads of its own."""
    return loaded(Path(shutil.copy(compiled, tmp_path)), request.param)


def threads_now() -> set[int]:
    return set(map(int, os.listdir("/proc/self/task")))


def cpu_s(thread: int) -> float:
    fields = Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")  # in the program and in the system


def helper_of(sgemm: Sgemm) -> int:
    """The one thread that a large matmul with two threads starts."""
    before = threads_now()
    sgemm(numbers(0, 4, 576), numbers(1, 4000, 576), num_threads=2)
    (helper,) = threads_now() - before
    return helper


needs_two_cpus = pytest.mark.skipif(threads.usable_cpus() < 2, reason="nobody could help")


@needs_two_cpus
@measures_time
def test_a_helper_takes_work_off_the_caller(sgemm: Sgemm) -> None:
    x, w = numbers(0, 64, 576), numbers(1, 4000, 576)

    def best_s_of_the_caller(num_threads: int) -> float:
        seconds = []
        for _ in range(40):
            start = time.thread_time()
            sgemm(x, w, num_threads)
            seconds.append(time.thread_time() - start)
        return min(seconds)

    assert best_s_of_the_caller(2) < 0.8 * best_s_of_the_caller(1)


@needs_two_cpus
def test_a_helper_works_while_there_are_products_and_sleeps_while_there_are_none(sgemm: Sgemm) -> None:
    helper = helper_of(sgemm)
    x, w = numbers(0, 4, 576), numbers(1, 4000, 576)
    start = cpu_s(helper)

    def has_worked() -> bool:
        for _ in range(100):
            sgemm(x, w, num_threads=2)
        return cpu_s(helper) >= start + 0.1

    def is_asleep() -> bool:
        dozing = cpu_s(helper)
        time.sleep(0.5)
        return cpu_s(helper) == dozing

    wait_until(has_worked)
    wait_until(is_asleep)


@pytest.fixture
def cores() -> Iterator[set[int]]:
    """Those of this thread, which gets them back."""
    before = os.sched_getaffinity(0)
    yield before
    os.sched_setaffinity(0, before)


@needs_two_cpus
def test_a_helper_that_waits_for_the_callers_core_is_sent_away(sgemm: Sgemm, cores: set[int]) -> None:
    helper = helper_of(sgemm)
    x, w = numbers(0, 4, 576), numbers(1, 4000, 576)
    core = min(cores)
    os.sched_setaffinity(helper, {core})

    def is_free() -> bool:
        os.sched_setaffinity(0, {core})
        os.sched_setaffinity(0, cores)  # a thread stays where it is, unless something else runs there
        time.sleep(0.001)  # until the helper is asleep
        for _ in range(20):
            sgemm(x, w, num_threads=2)
        return os.sched_getaffinity(helper) == cores

    wait_until(is_free)


@needs_two_cpus
def test_a_caller_with_one_core_leaves_its_helper_alone(sgemm: Sgemm, cores: set[int]) -> None:
    helper = helper_of(sgemm)
    x, w = numbers(0, 4, 576), numbers(1, 4000, 576)
    alone = sgemm(x, w)
    core = min(cores)
    os.sched_setaffinity(0, {core})
    os.sched_setaffinity(helper, {core})
    for _ in range(50):
        time.sleep(0.001)
        assert np.array_equal(sgemm(x, w, num_threads=2), alone)
    assert os.sched_getaffinity(helper) == {core}


@pytest.mark.parametrize("shape", [(1, 1536, 576), (7, 577, 1537), (64, 963, 576), (384, 144, 64)])
def test_the_number_of_threads_does_not_change_a_bit(sgemm: Sgemm, shape: tuple[int, int, int]) -> None:
    x, w = numbers(0, shape[0], shape[2]), numbers(1, *shape[1:])
    alone = sgemm(x, w)
    for turn in range(60):
        assert np.array_equal(sgemm(x, w, num_threads=1 + turn % 5), alone)


@pytest.mark.parametrize("shape", [(1, 2000, 1537), (52, 900, 64), (193, 300, 577), (900, 300, 64)])
def test_nor_does_it_change_a_bit_of_weighted_values(sgemm: Sgemm, shape: tuple[int, int, int]) -> None:
    x, v = numbers(0, *shape[:2]), numbers(1, *shape[1:])
    alone = sgemm.values(x, v)
    for turn in range(60):
        assert np.array_equal(sgemm.values(x, v, num_threads=1 + turn % 5), alone)


def test_callers_that_come_together_all_get_their_product(sgemm: Sgemm) -> None:
    pairs = [(numbers(i, 1 + i, 576), numbers(9 + i, 1000, 576)) for i in range(4)]
    alone = [sgemm(x, w) for x, w in pairs]
    wrong = []

    def call(number: int) -> None:
        for _ in range(100):
            if not np.array_equal(sgemm(*pairs[number], num_threads=3), alone[number]):
                wrong.append(number)

    callers = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_forked_amid_products_computes_with_threads_of_its_own(sgemm: Sgemm) -> None:
    x, w = numbers(0, 4, 576), numbers(1, 4000, 576)
    alone = sgemm(x, w)
    is_over, wrong = threading.Event(), []

    def multiply() -> None:
        while not is_over.is_set():
            if not np.array_equal(sgemm(x, w, num_threads=3), alone):
                wrong.append(1)

    def child_is_right() -> bool:
        are_right = all(np.array_equal(sgemm(x, w, num_threads=3), alone) for _ in range(20))
        give_up_s = time.monotonic() + PATIENCE_S / 2  # on a busy machine a thread may be listed late
        while len(threads_now()) != 3 and time.monotonic() < give_up_s:
            time.sleep(0.01)
        return are_right and len(threads_now()) == 3

    other = threading.Thread(target=multiply)
    other.start()
    num = in_test_or_soak(8, 20)
    codes = [exit_code_of_a_child(child_is_right) for _ in range(num)]
    is_over.set()
    other.join()
    assert codes == [0] * num
    assert wrong == []
    assert np.array_equal(sgemm(x, w, num_threads=3), alone)
