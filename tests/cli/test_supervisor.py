"""The supervisor: with workers of a few lines that behave badly, and once with a real server."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import faulty_engine
from outrider.cli.serve import _listening_socket
from outrider.cli.supervisor import Supervisor
from outrider.cli.worker import HUNG, VARIABLE, inherited
from outrider.config import InvalidConfig
from patience import PATIENCE_S, wait_until
from server_process import ServerProcess, serving, write_tiny_model

# -- scripted workers ------------------------------------------------------------------------------------

SUPERVISE = """
import logging, socket, sys
from outrider.cli import supervisor
logging.basicConfig(format="%(message)s")
supervisor.EXTRA_S = 0.0
supervisor.LOOK_S = 0.05
listener = socket.create_server(("127.0.0.1", 0))
sys.exit(supervisor.Supervisor(["-c", sys.argv[1]], listener, *map(float, sys.argv[2:])).run())
"""
WORKER = """
import os, signal, socket, sys, time
from outrider.cli.worker import inherited
worker = inherited()
worker.settle()
def ready(): worker.report_alive(); print("ready", os.getpid(), dict(worker.restarts), flush=True)
"""
DEAF = "signal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True)); ready()\n"
BEATS = "while True: worker.report_alive(); time.sleep(0.02)"


@contextlib.contextmanager
def supervised(
    script: str,
    stop_timeout_s: float = PATIENCE_S,
    silence_timeout_s: float = PATIENCE_S,
    supervise: str = SUPERVISE,
) -> Iterator[subprocess.Popen[str]]:
    limits = (str(stop_timeout_s), str(silence_timeout_s))
    process = subprocess.Popen(
        [sys.executable, "-c", supervise, WORKER + script, *limits],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(PATIENCE_S)


def read_until(process: subprocess.Popen[str], words: str) -> str:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if words in line:
            return "".join(lines)
    raise AssertionError(f"{words!r} was not said:\n" + "".join(lines))


def test_a_rank_without_clients_is_started_again_until_rank_0_stops_it() -> None:
    script = "ready(); assert worker.listener is None; sys.exit(0 if worker.num_restarts else 70)"
    no_clients = SUPERVISE.replace('socket.create_server(("127.0.0.1", 0))', "None")
    with supervised(script, supervise=no_clients) as process:
        said = read_until(process, "{'engine_failed': 1}")
        assert "the worker ended because its engine failed; a new one starts now" in said
        assert process.wait(PATIENCE_S) == 0


def test_crash_loop_backs_off_and_says_why() -> None:
    with supervised("ready(); os.kill(os.getpid(), signal.SIGSEGV)") as process:
        said = read_until(process, "in 2 s")
        process.terminate()  # during the delay: there is no worker
        assert process.wait(PATIENCE_S) == 0
    assert re.findall(r"the worker was ended by SIGSEGV \(.*\); a new one starts (.*)", said) == [
        "now",
        "in 1 s",
        "in 2 s",
    ]
    assert "{'signal': 2}" in said


@pytest.mark.parametrize(
    ("script", "status", "words"),
    [
        ("sys.exit(2)", 2, ""),
        ("sys.exit(1)", 1, "the server could not start: the worker ended with exit status 1\n"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "memory ran out"),
    ],
)
def test_start_that_never_worked_is_not_repeated(script: str, status: int, words: str) -> None:
    with supervised(script) as process:
        said = process.communicate(timeout=PATIENCE_S)[0]
    assert process.returncode == status
    assert words in said
    assert bool(words) == bool(said)


def test_worker_that_shows_no_sign_of_life_is_replaced() -> None:
    with supervised("ready()\ntime.sleep(1e6)", silence_timeout_s=0.3) as process:
        said = read_until(process, "{'hung': 1}")
    assert "the worker hung and was killed" in said


def test_worker_that_does_not_end_in_time_is_killed() -> None:
    with supervised(DEAF + BEATS, stop_timeout_s=0.3) as process:
        read_until(process, "ready")
        process.send_signal(signal.SIGINT)
        assert "did not end in time" in read_until(process, "did not end in time")
        assert process.wait(PATIENCE_S) == 128 + signal.SIGINT


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_second_signal_ends_at_once(number: signal.Signals) -> None:
    if signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip("the tests run under nohup")
    with supervised(DEAF + BEATS) as process:
        read_until(process, "ready")
        if number != signal.SIGHUP:  # the end of the terminal: at once already
            process.send_signal(number)
            read_until(process, "asked")
        process.send_signal(number)
        assert "ends at once" in read_until(process, "ends at once")
        assert process.wait(PATIENCE_S) == 128 + number


def serve_with_short_load_timeout(model: Path, program: str) -> subprocess.CompletedProcess[str]:
    code = f"import runpy, threading\n{program}\nrunpy.run_module('outrider', run_name='__main__')"
    flags = ["--port", "0", "--load-timeout", "3", "--no-supervisor"]  # long enough to begin to load
    command = [sys.executable, "-c", code, "serve", str(model), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)


def test_server_whose_model_does_not_load_ends(tmp_path: Path) -> None:
    done = serve_with_short_load_timeout(
        write_tiny_model(tmp_path),
        "import outrider.build\n"
        "def hanging(*_): threading.Event().wait()\n"
        "outrider.build.build_engine = hanging\n",
    )
    assert done.returncode == HUNG, done.stderr
    assert "the model was not loaded within 3 s (--load-timeout)" in done.stderr
    assert "in hanging" in done.stderr  # its stack


def test_server_whose_model_file_cannot_be_opened_ends(tmp_path: Path) -> None:
    """As on a network file system that hangs: MLX waits for the file and keeps Python's lock."""
    weights = write_tiny_model(tmp_path) / "model.safetensors"
    weights.unlink()
    os.mkfifo(weights)
    done = serve_with_short_load_timeout(
        tmp_path, "import outrider.cli.watchdog\noutrider.cli.watchdog.REPORT_S = 0.5\n"
    )
    assert done.returncode in (1, HUNG), done.stderr
    assert "in load" in done.stderr  # its stack


def test_variable_that_the_supervisor_did_not_set_is_refused() -> None:
    for text in ("", "[]", "{}", '{"family": 2, "listener": 999999, "supervisor": 3}'):
        environ = {VARIABLE: text}
        with pytest.raises(InvalidConfig, match="unset it"):
            inherited(environ)
        assert environ == {}
    assert inherited({}) is None


def test_delay_starts_anew_after_a_long_life(monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor, now_s = Supervisor([], socket.socket(), 0, 0), [1.0]
    monkeypatch.setattr("time.monotonic", lambda: now_s[0])
    delays = [supervisor._next_delay_s(0.0) for _ in range(9)]
    assert delays == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    now_s[0] = 100.0
    assert supervisor._next_delay_s(0.0) == 0
    assert [supervisor._next_delay_s(None) for _ in range(2000)][-1] == 60


# -- a real server ---------------------------------------------------------------------------------------


def test_port_is_taken_before_the_model_is_loaded() -> None:
    with _listening_socket("127.0.0.1", 0) as first, pytest.raises(InvalidConfig, match="cannot listen"):
        _listening_socket("127.0.0.1", first.getsockname()[1])


def test_worker_that_dies_is_replaced_and_dies_with_its_supervisor(tmp_path: Path) -> None:
    model, hold_file = write_tiny_model(tmp_path / "tiny", with_head=False), tmp_path / "hold"
    with serving(model, program=faulty_engine.PROGRAM, HOLD_FILE=str(hold_file)) as server:
        assert server.process.stdout is not None
        server.process.stdout.close()  # the program that read the log has ended: the server goes on
        workers = [worker_of(server)]
        _kill_in_mid_stream(server, hold_file)
        assert post(server, seed=1).status_code == 200
        assert num_restarts(server, "signal") == 1
        workers.append(worker_of(server))
        _panic(server)
        wait_until(lambda: num_restarts(server, "engine_failed") == 1)
        assert post(server, seed=1).status_code == 200
        workers.append(worker_of(server))
        assert len({server.process.pid, *workers}) == 4
        server.process.kill()
        wait_until(lambda: refuses_connections(server))


def _kill_in_mid_stream(server: ServerProcess, hold_file: Path) -> None:
    """The client's connection ends; a connection that is made meanwhile waits for the next worker."""
    hold_file.touch()
    ended: list[Exception] = []

    def read() -> None:
        try:
            post(server, seed=faulty_engine.HOLD_SEED)
        except httpx.TransportError as error:
            ended.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    wait_until(lambda: server.get("/v1/status")["live_requests"])
    os.kill(worker_of(server), signal.SIGKILL)
    assert server.get("/health") == {"status": "ready"}
    reader.join(PATIENCE_S)
    assert ended, "the stream did not end"
    hold_file.unlink()


def _panic(server: ServerProcess) -> None:
    """A running stream gets an error event and its end."""
    lines = post(server, seed=faulty_engine.PANIC_SEED).text.splitlines()
    assert any('"error"' in line for line in lines), lines
    assert "data: [DONE]" in lines


def post(server: ServerProcess, seed: int) -> httpx.Response:
    return server.post("/v1/completions", {"prompt": "a", "max_tokens": 3, "stream": True, "seed": seed})


def num_restarts(server: ServerProcess, reason: str) -> float | None:
    """None: the old worker closed the connection as it ended."""
    try:
        return server.metric(f'outrider_worker_restarts_total{{reason="{reason}"}}')
    except httpx.TransportError:
        return None


def refuses_connections(server: ServerProcess) -> bool:
    try:
        httpx.get(f"{server.url}/health", timeout=PATIENCE_S)
    except httpx.ConnectError:
        return True
    except httpx.TransportError:  # accepted by the last worker, which ended then
        pass
    return False


def worker_of(server: ServerProcess) -> int:
    processes = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True)
    pairs = [map(int, line.split()) for line in processes.stdout.splitlines()]
    (worker,) = [pid for pid, parent in pairs if parent == server.process.pid]
    return worker
