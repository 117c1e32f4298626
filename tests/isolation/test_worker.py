"""Worker processes: a job that crashes, hangs or takes too much fails alone, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.isolation import worker as worker_module
from outrider.isolation.messages import Message
from outrider.isolation.stacks import run_with_stack
from outrider.isolation.worker import IsolatedWorker, JobFailed, JobTimedOut, WorkerLimits, WorkerUnavailable
from patience import PATIENCE_S, wait_until

LIMITS = WorkerLimits(memory_bytes=64 << 20, cpu_s=1, answer_s=PATIENCE_S, max_reply_bytes=1000)
needs_proc = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="reads /proc")


def new_worker(limits: WorkerLimits = LIMITS, **set_up: object) -> IsolatedWorker:
    return IsolatedWorker("odd_jobs_child", limits, lambda: Message({"name": "tests", **set_up}))


@pytest.fixture(scope="module")
def worker() -> Iterator[IsolatedWorker]:
    worker = new_worker()
    yield worker
    worker.close()


def does_its_job(worker: IsolatedWorker) -> bool:
    reply = worker.call({"do": "reverse"}, b"abc")
    return reply.fields == {"set_up": {"name": "tests"}} and bytes(reply.data) == b"cba"


def is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        ({"do": "crash"}, "crashed"),
        ({"do": "abort"}, "memory, or crashed"),
        ({"do": "compute"}, "1 s of processor time"),
        ({"do": "raise"}, "^it raised an exception$"),
        ({"do": "many_bytes", "num_bytes": 1001}, "^its result could not be read$"),
        pytest.param({"do": "take_memory", "num_bytes": 128 << 20}, "too much memory", marks=needs_proc),
    ],
)
def test_bad_job_fails_alone(worker: IsolatedWorker, job: dict[str, object], reason: str) -> None:
    with pytest.raises(JobFailed, match=reason):
        worker.call(job)
    assert does_its_job(worker)


def test_job_that_waits_for_ever_is_given_up() -> None:
    worker = new_worker(replace(LIMITS, answer_s=0.2))
    with pytest.raises(JobTimedOut, match=r"0\.2 s"):
        worker.call({"do": "wait"})
    worker.close()


def test_process_starts_with_the_first_job_and_serves_the_next_ones() -> None:
    worker = new_worker()
    assert worker.process_id is None
    assert does_its_job(worker)
    first = worker.process_id
    assert does_its_job(worker)
    assert worker.process_id == first
    worker.close()


def test_job_is_not_blamed_for_the_death_of_a_used_process(worker: IsolatedWorker) -> None:
    assert does_its_job(worker)
    killed = worker.process_id
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    assert does_its_job(worker)
    assert worker.process_id != killed


def test_killed_process_is_not_the_jobs_fault() -> None:
    """Such as by the system, because memory has run out."""
    worker = new_worker()
    with pytest.raises(WorkerUnavailable, match="killed"):
        worker.call({"do": "be_killed"})
    assert does_its_job(worker)
    worker.close()


def test_process_that_only_closes_its_connection_has_not_been_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_module, "END_S", 0.1)
    worker = new_worker()
    with pytest.raises(JobFailed, match="closed the connection"):
        worker.call({"do": "close_connection"})
    worker.close()


def test_signals_for_the_server_do_not_end_the_process(worker: IsolatedWorker) -> None:
    assert does_its_job(worker)
    before = worker.process_id
    assert before is not None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(before, number)
    assert does_its_job(worker)
    assert worker.process_id == before


def test_process_gets_none_of_the_servers_secrets(
    worker: IsolatedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_API_KEY", "secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    fresh = new_worker(replace(LIMITS, max_reply_bytes=10_000))
    names = fresh.call({"do": "environment"}).fields["names"]
    assert "PATH" in names
    assert not {"OUTRIDER_API_KEY", "HF_TOKEN"} & set(names)
    fresh.close()


def test_modules_of_the_current_folder_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('planted')")
    monkeypatch.chdir(tmp_path)
    worker = new_worker()
    assert does_its_job(worker)
    worker.close()


def test_lower_limits_of_the_operator_stay() -> None:
    code = (
        "import resource\n"
        "from test_worker import new_worker, does_its_job, LIMITS, replace\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "worker = new_worker(replace(LIMITS, memory_bytes=1 << 41, file_bytes=1 << 21))\n"
        "assert does_its_job(worker)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


def test_failed_set_up_is_the_servers_fault() -> None:
    worker = new_worker(is_broken=True)
    with pytest.raises(WorkerUnavailable, match="broken set-up"):
        worker.call({"do": "reverse"})
    assert worker.process_id is None
    with pytest.raises(WorkerUnavailable):
        IsolatedWorker("no_such_module", LIMITS).call({})


def connections() -> set[str]:
    """All sockets and pipes of this process. (Its other threads open files for a moment.)"""
    found: set[str] = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found.add(os.readlink(f"/proc/self/fd/{number}"))
    return {name for name in found if name.startswith(("socket:", "pipe:"))}


@needs_proc
def test_nothing_is_left_behind() -> None:
    before = connections()
    closed, dropped = new_worker(), new_worker()
    ids = []
    for worker in (closed, dropped):
        assert does_its_job(worker)
        assert worker.process_id is not None
        ids.append(worker.process_id)
    closed.close()
    del worker, dropped
    wait_until(lambda: not any(map(is_alive, ids)))  # neither a process nor a zombie
    assert connections() <= before
    with pytest.raises(WorkerUnavailable, match="shutting down"):
        closed.call({"do": "reverse"})


def test_close_ends_a_job_that_runs() -> None:
    worker, failures = new_worker(), []
    assert does_its_job(worker)

    def call() -> None:
        try:
            worker.call({"do": "wait"})
        except WorkerUnavailable as failure:
            failures.append(failure)

    thread = threading.Thread(target=call)
    thread.start()
    wait_until(worker._lock.locked)
    worker.close()
    thread.join(PATIENCE_S)
    assert len(failures) == 1


def test_process_ends_with_its_server() -> None:
    code = (
        "import os, signal\n"
        "from test_worker import new_worker, does_its_job\n"
        "worker = new_worker()\n"
        "assert does_its_job(worker)\n"
        "print(worker.process_id, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    paths = os.pathsep.join(filter(None, sys.path))
    server = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths}
    )
    assert server.returncode == -signal.SIGKILL
    process_id = int(server.stdout)
    wait_until(lambda: not is_alive(process_id) or _is_zombie(process_id))


def _is_zombie(process_id: int) -> bool:
    """True if nothing is left but an entry that nobody reads (in a container without an init process)."""
    try:
        with open(f"/proc/{process_id}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_deep_stacks_return_and_raise() -> None:
    assert run_with_stack(1 << 20, lambda: threading.current_thread().name) == "outrider-deep-stack"
    with pytest.raises(ZeroDivisionError):
        run_with_stack(1 << 20, lambda: 1 // 0)
    assert threading.stack_size() == 0
