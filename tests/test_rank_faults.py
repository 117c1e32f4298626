"""Servers on several ranks: ranks that are lost, stopped or differ, and those of mlx.launch."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import mlx.core as mx
import pytest

from models.head_checkpoints import tiny_head
from patience import IN_SOAK, PATIENCE_S, wait_until
from server_process import ServerProcess, read_until_ready, serving
from test_head_layouts_served import write_model
from tiny_models import write_checkpoint

RANK_TIMEOUT_S = 4
LAUNCHER = Path(sys.executable).with_name("mlx.launch")
OTHER_VERSION = "import runpy, outrider; outrider.__version__ = '0.0.1'; " + (
    "runpy.run_module('outrider', run_name='__main__')"
)

STUCK = """
import os, pathlib, runpy, time
from outrider.step.runner import Runner
follow = Runner.follow
def wait_and_follow(self, step):
    while pathlib.Path(os.environ["STUCK"]).exists():
        time.sleep(0.02)
    follow(self, step)
if os.environ.get("MLX_RANK") == "1":
    Runner.follow = wait_and_follow
runpy.run_module("outrider", run_name="__main__")
"""  # rank 1 computes nothing while the file $STUCK exists, and sends its signs of life

DIES_IN_A_DRAFT = """
import os, pathlib, runpy, signal
from outrider.step.mtp import MTPDrafter
on_all_ranks = MTPDrafter._on_all_ranks
def die(self, array):
    if pathlib.Path(os.environ["DIES"]).exists():
        os.kill(os.getpid(), signal.SIGKILL)
    return on_all_ranks(self, array)
if os.environ.get("MLX_RANK") == "1":
    MTPDrafter._on_all_ranks = die
runpy.run_module("outrider", run_name="__main__")
"""  # rank 1 is killed before it learns the second draft, while the file $DIES exists

FAILING = """
import os, pathlib, runpy
from outrider.step.forward import Forward
run = Forward.run
def fail_or_run(self, *inputs, **named):
    if pathlib.Path(os.environ["FAILING"]).exists():
        pathlib.Path(os.environ["FAILING"]).unlink()
        raise RuntimeError("no memory left on rank 0")
    return run(self, *inputs, **named)
Forward.run = fail_or_run  # other ranks call `follow`
runpy.run_module("outrider", run_name="__main__")
"""  # a step fails on rank 0 only if the file $FAILING exists

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(not IN_SOAK, reason="starts many processes: runs under `make soak` only"),
    pytest.mark.skipif(not Path("/proc").exists(), reason="finds the ranks' processes in /proc"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks") / "model"
    heads = {"num_key_value_heads": 4, "num_attention_heads": 8, "head_dim": 32}
    write_checkpoint(folder, "llama", **heads, max_position_embeddings=8192)
    return folder


@pytest.fixture(scope="module")
def wanted(model: Path) -> str:
    with serving(model) as alone:
        return text_of(alone)


def text_of(server: ServerProcess, max_tokens: int = 12) -> str:
    body = {"prompt": "the ranks", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    response = server.post("/v1/completions", body)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


def read_log(server: ServerProcess) -> list[str]:
    """The lines that the server writes from now on. (A full pipe would stop it.)"""
    lines: list[str] = []
    stdout = server.process.stdout
    assert stdout is not None
    threading.Thread(target=lambda: lines.extend(stdout), daemon=True).start()
    return lines


def children(pid: int) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False)
    return [int(line) for line in found.stdout.split()]


def rank_of(pid: int) -> int | None:
    """The rank of a process that still runs."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    ranks = [int(one.removeprefix(b"MLX_RANK=")) for one in variables if one.startswith(b"MLX_RANK=")]
    return ranks[0] if ranks else None


def is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


@contextmanager
def streaming(server: ServerProcess) -> Iterator[Callable[[], str]]:
    """A long answer of which the first event has come. The function waits for the rest of the stream."""
    body = {"prompt": "a long one", "max_tokens": 6000, "stream": True, "ignore_eos": True}
    rest: list[str] = []
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")

        def read() -> str:
            try:
                rest.extend(lines)
            except httpx.HTTPError as error:
                rest.append(f"broken: {error!r}")
            return "\n".join(rest)

        yield read


class HealthLog:
    """What /health/ready says, asked ten times a second."""

    def __init__(self, url: str) -> None:
        self.faults: list[str] = []
        self._url = url
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> HealthLog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._has_ended.wait(0.1):
            try:
                response = httpx.get(f"{self._url}/health/ready", timeout=5)
            except httpx.HTTPError:
                continue
            if response.status_code == 503:
                self.faults.append(response.json()["status"])


def started_ranks(server: ServerProcess) -> list[int]:
    """The processes of --tensor-parallel 2, by rank."""
    (worker,) = children(server.process.pid)
    return [worker, *(pid for pid in children(worker) if rank_of(pid) == 1)]


FAULTS = [  # which rank, how, what the stream gets, what /health/ready says
    (1, signal.SIGKILL, '"error"', "rank 1 of this model"),
    (1, signal.SIGSTOP, '"error"', "rank 1 of this model has shown no sign of life for"),
    (0, signal.SIGKILL, "broken", ""),
    (0, signal.SIGSTOP, "broken", ""),
]


def comes_back_after_faults(
    server: ServerProcess, ranks_of: Callable[[ServerProcess], list[int]], wanted: str
) -> None:
    log = read_log(server)
    for rank, number, in_stream, in_health in FAULTS:
        assert text_of(server) == wanted, "".join(log)
        pids = ranks_of(server)
        assert len(pids) == 2
        began_s = time.monotonic()
        with streaming(server) as rest, HealthLog(server.url) as health:
            os.kill(pids[rank], number)
            assert in_stream in rest(), "".join(log)
            took_s = time.monotonic() - began_s
            wait_until(lambda pids=pids: all(is_gone(pid) for pid in pids))
        if in_health:
            assert any(text.startswith(in_health) for text in health.faults), (health.faults, log)
        assert text_of(server) == wanted, "".join(log)
        back_s = time.monotonic() - began_s
        print(f"rank {rank}, {number.name}: clients told after {took_s:.1f} s, back after {back_s:.1f} s")


def test_a_server_comes_back_after_every_fault_of_a_rank(model: Path, wanted: str) -> None:
    flags = ("--tensor-parallel", "2", "--rank-timeout", str(RANK_TIMEOUT_S))
    with serving(model, *flags) as server:
        comes_back_after_faults(server, started_ranks, wanted)


def test_a_rank_that_is_stopped_for_a_short_time_goes_on(model: Path) -> None:
    with serving(model, "--tensor-parallel", "2", "--rank-timeout", "60") as server:
        pids = started_ranks(server)
        want = text_of(server, 300)
        for pid in (pids[1], pids[0]):
            found: list[str] = []
            answer = threading.Thread(target=lambda found=found: found.append(text_of(server, 300)))
            answer.start()
            time.sleep(0.5)
            os.kill(pid, signal.SIGSTOP)
            time.sleep(2)
            os.kill(pid, signal.SIGCONT)
            answer.join(PATIENCE_S)
            assert found == [want]
        assert started_ranks(server) == pids


def test_a_slow_rank_is_waited_for(model: Path, wanted: str, tmp_path: Path) -> None:
    """It is slower than --rank-timeout allows for signs of life, which it still sends."""
    stuck = tmp_path / "stuck"
    flags = ("--tensor-parallel", "2", "--rank-timeout", "2", "--step-timeout", "60")
    with serving(model, *flags, program=("-c", STUCK), STUCK=str(stuck)) as server:
        pids = started_ranks(server)
        stuck.touch()
        threading.Timer(5, stuck.unlink).start()
        assert text_of(server) == wanted
        assert started_ranks(server) == pids


def test_a_rank_that_computes_for_ever_is_noticed(model: Path, wanted: str, tmp_path: Path) -> None:
    stuck = tmp_path / "stuck"
    flags = ("--tensor-parallel", "2", "--step-timeout", str(RANK_TIMEOUT_S))
    with serving(model, *flags, program=("-c", STUCK), STUCK=str(stuck)) as server:
        log = read_log(server)
        assert text_of(server) == wanted
        pids = started_ranks(server)
        with streaming(server) as rest, HealthLog(server.url) as health:
            stuck.touch()
            assert '"error"' in rest(), "".join(log)
            stuck.unlink()
            wait_until(lambda: all(is_gone(pid) for pid in pids))
        assert any(text.startswith("the engine hangs") for text in health.faults), (health.faults, log)
        assert text_of(server) == wanted, "".join(log)


def test_a_rank_that_dies_in_the_middle_of_a_draft_is_noticed(tmp_path: Path) -> None:
    folder, dies = tmp_path / "model", tmp_path / "dies"
    tiny = tiny_head("qwen3_5", 1)
    write_model(folder, tiny, tiny.converted())
    depth = ("--draft-depth", "3")
    with serving(folder, *depth) as alone:
        want = text_of(alone)
    flags = ("--tensor-parallel", "2", "--rank-head", "divided", *depth)
    with serving(folder, *flags, program=("-c", DIES_IN_A_DRAFT), DIES=str(dies)) as server:
        log = read_log(server)
        assert text_of(server) == want
        pids = started_ranks(server)
        with HealthLog(server.url) as health:
            dies.touch()
            body = {"prompt": "the ranks", "max_tokens": 50, "temperature": 0, "ignore_eos": True}
            response = server.post("/v1/completions", body)
            assert response.status_code == 500, response.text
            dies.unlink()
            wait_until(lambda: all(is_gone(pid) for pid in pids))
        assert any(text.startswith("rank 1 of this model") for text in health.faults), (health.faults, log)
        assert text_of(server) == want, "".join(log)


def test_a_step_that_fails_on_rank_0_only_ends_all_ranks(model: Path, wanted: str, tmp_path: Path) -> None:
    """Else the sums of the next step would be added to those of this one."""
    failing = tmp_path / "failing"
    flags = ("--tensor-parallel", "2")
    with serving(model, *flags, program=("-c", FAILING), FAILING=str(failing)) as server:
        log = read_log(server)
        assert text_of(server) == wanted
        pids = started_ranks(server)
        with streaming(server) as rest:
            failing.touch()
            assert '"error"' in rest(), "".join(log)
            wait_until(lambda: all(is_gone(pid) for pid in pids))
        assert text_of(server) == wanted, "".join(log)
        assert any("a step failed on rank 0 only: no memory left on rank 0" in line for line in log)


def test_an_idle_rank_keeps_no_core_busy(model: Path) -> None:
    def cpu_s(pid: int) -> float:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    with serving(model, "--tensor-parallel", "2") as server:
        _, rank_1 = started_ranks(server)
        text_of(server)
        server.wait_until_idle()
        time.sleep(0.5)
        before_s = cpu_s(rank_1)
        time.sleep(4)
        assert cpu_s(rank_1) - before_s < 0.4


# -- mlx.launch ------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@contextmanager
def launched(model: Path, *flags: str) -> Iterator[ServerProcess]:
    """mlx.launch with two ranks of `outrider serve`. `flags`: of mlx.launch."""
    serve = [sys.executable, "-m", "outrider", "serve", str(model), "--port", "0"]
    serve += ["--rank-timeout", str(RANK_TIMEOUT_S)]
    command = [str(LAUNCHER), *flags, "--backend", "ring", "--starting-port", str(free_port()), "--", *serve]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,  # mlx.launch reads it
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        url, banner = read_until_ready(process)
        yield ServerProcess(process, url, banner, model.name)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(PATIENCE_S)


def supervisors_of(server: ServerProcess) -> list[int]:
    """By rank."""
    found = {rank_of(pid): pid for pid in children(server.process.pid)}
    return [found[0], found[1]]


def launched_ranks(server: ServerProcess) -> list[int]:
    """The processes that run the model, by rank. Each has a supervisor."""
    return [worker for pid in supervisors_of(server) for worker in children(pid)]


def two_hosts(folder: Path) -> str:
    """A hostfile whose hosts are this machine: mlx.launch needs no ssh for them."""
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps(2 * [{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}]))
    return str(hosts)


@pytest.mark.skipif(not LAUNCHER.exists(), reason="mlx.launch is not installed")
def test_ranks_of_mlx_launch_serve_and_stop(model: Path, wanted: str) -> None:
    with launched(model, "-n", "2") as server:
        assert text_of(server) == wanted
        pids = [*supervisors_of(server), *launched_ranks(server)]
        for pid in pids:
            os.kill(pid, signal.SIGTERM)  # as a service manager does; rank 0 stops the other one
        assert server.process.wait(PATIENCE_S) == 0
        assert all(is_gone(pid) for pid in pids)


@pytest.mark.skipif(not LAUNCHER.exists(), reason="mlx.launch is not installed")
def test_ranks_of_a_hostfile_come_back_after_every_fault(model: Path, wanted: str, tmp_path: Path) -> None:
    with launched(model, "--hostfile", two_hosts(tmp_path)) as server:
        comes_back_after_faults(server, launched_ranks, wanted)


@pytest.mark.skipif(not LAUNCHER.exists(), reason="mlx.launch is not installed")
@pytest.mark.parametrize("lost", [0, 1])
def test_mlx_launch_ends_when_a_supervisor_is_gone(model: Path, tmp_path: Path, lost: int) -> None:
    with launched(model, "--hostfile", two_hosts(tmp_path)) as server:
        supervisors, ranks = supervisors_of(server), launched_ranks(server)
        os.kill(supervisors[lost], signal.SIGKILL)
        server.process.wait(PATIENCE_S)
        wait_until(lambda: all(is_gone(pid) for pid in (*supervisors, *ranks)))


# -- ranks that differ -----------------------------------------------------------------------------------


def refusals(commands: list[list[str]], tmp_path: Path) -> list[str]:
    """What each rank writes before it ends with status 2."""
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{free_port()}"] for _ in commands]))
    ranks = [
        subprocess.Popen(
            [sys.executable, *command, "--port", "0"],
            env={**os.environ, "MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, command in enumerate(commands)
    ]
    try:
        texts = [rank.communicate(timeout=PATIENCE_S)[0] for rank in ranks]
        assert 2 in {rank.returncode for rank in ranks}, texts
        assert 0 not in {rank.returncode for rank in ranks}, texts
    finally:
        for rank in ranks:
            rank.kill()
    return texts


def differing_commands(model: Path, tmp_path: Path) -> dict[str, list[list[str]]]:
    serve = ["-m", "outrider", "serve", str(model)]
    other = tmp_path / "other"
    shutil.copytree(model, other)
    weights = {name: array + 1 for name, array in mx.load(str(model / "model.safetensors")).items()}
    mx.save_safetensors(str(other / "model.safetensors"), weights, {"format": "mlx"})
    return {
        "Outrider": [serve, ["-c", OTHER_VERSION, "serve", str(model)]],
        "weight files": [serve, ["-m", "outrider", "serve", str(other)]],
        "--kv-bits": [serve, [*serve, "--kv-bits", "8"]],
        "--dtype": [serve, [*serve, "--dtype", "float16"]],
    }


@pytest.mark.parametrize("what", ["Outrider", "weight files", "--kv-bits", "--dtype"])
def test_ranks_that_differ_are_refused_with_both_fingerprints(model: Path, tmp_path: Path, what: str) -> None:
    texts = refusals(differing_commands(model, tmp_path)[what], tmp_path)
    told = [text for text in texts if f"They differ in {what} (rank 0: " in text]
    assert told, texts
    (line,) = [line for line in told[0].splitlines() if "They differ in" in line]
    first, second = line.split("rank 0: ")[1].split("; here")[0].split(", rank 1: ")
    assert len(first) == len(second) == 12
    assert first != second


def test_ranks_that_differ_are_refused_before_their_heads_are_timed(tmp_path: Path) -> None:
    folder, tiny = tmp_path / "model", tiny_head("qwen3_5", 1)
    write_model(folder, tiny, tiny.converted())
    serve = ["-m", "outrider", "serve", str(folder), "--drafter", "mtp"]
    texts = refusals([serve, [*serve, "--dtype", "float16"]], tmp_path)
    assert any("They differ in --dtype (" in text for text in texts), texts
