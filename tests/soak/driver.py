"""Drives a real server over HTTP: many clients of all APIs, attacks and faults at once.

Checked meanwhile: every well-formed request is answered, or refused with a reason, unless an injected fault
ended it; no attack gets a 500; a sample of the answers is asked again of the idle server, without drafts, and
must be the same; an idle server holds no row, thread, descriptor or memory that it did not hold before;
/health/live answers quickly.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import httpx

from outrider.engine.engine import IDLE_S
from patience import PATIENCE_S
from server_process import read_until_ready
from soak.conversations import CHAT, Answer, ApiRequest, new_request, next_turn, read_events, read_whole, same
from soak.hostile import Attack, attack, posted

HERE = Path(__file__).parent
FLAGS = (
    *("--max-rows", "8", "--max-queue", "120", "--max-context", "900", "--drafter", "ngram"),
    *("--prefix-cache-bytes", "16MB", "--drain", "5", "--log-level", "warning"),
    *("--header-timeout", "4", "--body-timeout", "6", "--write-timeout", "6", "--step-timeout", "20"),
)
RETRY_S = 0.2  # pause of a client that was refused
FUZZED_SHARE = 0.3  # of the attacks
SETTLE_S = 1.0  # after a fault, until its victims have noticed
LAZY_THREADS = 14  # of executors, which start them one by one: 6 of asyncio, 4 that load models, 4 more
MORE_DESCRIPTORS = 8  # that an idle server may have open, compared with the first time
CLIENTS_NICE = 5  # by how much the clients' priority is lower than the server's

# Faults that end the worker, and faults that it must survive.
DEADLY = ("kill", "hard", "term", "hang")
SURVIVED = ("exception", "memory", "nan", "slow", "disk", "clock", "clock back")


@dataclass(frozen=True)
class SoakPlan:
    seconds: float
    num_clients: int = 64
    num_attackers: int = 8
    fault_every_s: float = 15.0
    deadly_every: int = 12  # one of so many faults ends the worker
    deadly: tuple[str, ...] = DEADLY
    idle_every_s: float = 60.0
    idle_s: float = IDLE_S + 1  # until what an idle server holds is counted: it has given memory back then
    num_replayed: int = 60
    num_fuzzed: int = 4000  # bodies made from /openapi.json; 0: no process makes any
    seed: int = 0
    min_answers: int = 0  # and attacks, before the run ends
    min_faults: int = 0


@dataclass
class Window:
    """The time of a fault, in which answers may break."""

    fault: str
    begin_s: float
    end_s: float = float("inf")


@dataclass
class Footprint:
    """What the worker holds while idle."""

    pid: int
    at_s: float
    num_threads: int
    num_descriptors: int
    rss_bytes: int


@dataclass
class SoakReport:
    plan: SoakPlan
    took_s: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)  # of well-formed requests
    attacks: Counter[str] = field(default_factory=Counter)  # "name: outcome"
    faults: Counter[str] = field(default_factory=Counter)
    recovered_s: dict[str, list[float]] = field(default_factory=dict)  # by fault, until the next answer
    footprints: list[Footprint] = field(default_factory=list)
    num_tokens: int = 0
    num_replayed: int = 0
    num_different: int = 0
    health_s: list[float] = field(default_factory=list)  # of each probe, outside of deadly faults
    problems: list[str] = field(default_factory=list)

    def problem(self, text: str) -> None:
        if len(self.problems) < 50:
            self.problems.append(text[:1000])

    @property
    def health_p99_s(self) -> float:
        found = sorted(self.health_s)
        return found[int(len(found) * 0.99)] if found else 0.0

    def table(self) -> str:
        """For docs/RELIABILITY.md."""
        refused = sum(n for outcome, n in self.outcomes.items() if outcome.startswith("refused"))
        rows = [
            ("Duration", f"{self.took_s / 60:.0f} min, {self.plan.num_clients} clients"),
            ("Well-formed requests", f"{sum(self.outcomes.values()):,}"),
            ("… answered in full", f"{self.outcomes['answered']:,}"),
            ("… left by the client", f"{self.outcomes['left']:,}"),
            ("… refused with a reason", f"{refused:,}"),
            ("… ended by an injected fault", f"{self.outcomes['disturbed']:,}"),
            ("Tokens", f"{self.num_tokens:,}"),
            (
                "Answers asked again, alone and without drafts",
                f"{self.num_replayed:,}, of which {self.num_different} differ",
            ),
            ("Attacks", f"{sum(self.attacks.values()):,}"),
            ("Faults injected", ", ".join(f"{name} {n}" for name, n in sorted(self.faults.items()))),
            ("Longest until the next answer", self._longest()),
            ("/health/live, 99th percentile", f"{self.health_p99_s * 1000:.0f} ms"),
            ("Threads and descriptors when idle", self._held()),
            ("Memory when idle", self._memory()),
            ("Problems", str(len(self.problems))),
        ]
        return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])

    def _longest(self) -> str:
        found = {name: max(values) for name, values in self.recovered_s.items() if values}
        return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in sorted(found.items()))

    def _held(self) -> str:
        if not self.footprints:
            return "not measured"
        threads = [f.num_threads for f in self.footprints]
        descriptors = [f.num_descriptors for f in self.footprints]
        return f"{min(threads)}–{max(threads)}, {min(descriptors)}–{max(descriptors)}"

    def _memory(self) -> str:
        longest = max(self._by_worker(), key=len, default=[])
        if not longest:
            return "not measured"
        first, last = longest[0], longest[-1]
        minutes = (last.at_s - first.at_s) / 60
        return f"{first.rss_bytes / 1e6:.0f} -> {last.rss_bytes / 1e6:.0f} MB in {minutes:.0f} min"

    def _by_worker(self) -> list[list[Footprint]]:
        pids = dict.fromkeys(f.pid for f in self.footprints)
        return [[f for f in self.footprints if f.pid == pid] for pid in pids]

    def check_footprints(self) -> None:
        """Compare what each worker holds when idle with what it held when it was first idle."""
        for one_worker in self._by_worker():
            first, *rest = one_worker
            for later in rest:
                if later.num_threads > first.num_threads + LAZY_THREADS:
                    self.problem(f"threads grew from {first.num_threads} to {later.num_threads}")
                if later.num_descriptors > first.num_descriptors + MORE_DESCRIPTORS:
                    self.problem(f"descriptors grew from {first.num_descriptors} to {later.num_descriptors}")
            if len(one_worker) >= 4:  # the first rounds fill caches
                settled, last = one_worker[2], one_worker[-1]
                if last.rss_bytes > 1.15 * settled.rss_bytes + 32e6:
                    self.problem(f"memory grew from {settled.rss_bytes:,} to {last.rss_bytes:,} bytes")


class SoakServer:
    """A server with faults on request. After `stop`, `start` takes the same port again."""

    def __init__(self, model: Path, folder: Path, *flags: str) -> None:
        self._model = model
        self._folder = folder
        self._flags = flags
        self._fault_file = folder / "fault"
        self.log_path = folder / "server.log"
        self.port = 0
        self._priority = os.getpriority(os.PRIO_PROCESS, 0)
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        program = [sys.executable, str(HERE / "faulty_server.py"), str(self._fault_file)]
        flags = [*FLAGS, "--prefix-cache-dir", str(self._folder / "prefixes"), *self._flags]
        with open(self.log_path, "a") as log:
            self.process = subprocess.Popen(
                [*program, "serve", str(self._model), "--port", str(self.port), *flags],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        if os.geteuid() == 0:  # when it is started again, this process is nicer than it should be
            os.setpriority(os.PRIO_PROCESS, self.process.pid, self._priority)
        self.port = int(read_until_ready(self.process)[0].rpartition(":")[2])

    def worker_pid(self) -> int:
        """The process that computes: the supervisor's child."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        children = path.read_text().split()
        return int(children[0]) if children else self.process.pid

    def ask_for_fault(self, fault: str) -> None:
        temporary = self._fault_file.with_suffix(".new")
        temporary.write_text(fault)
        temporary.rename(self._fault_file)

    def is_fault_taken(self) -> bool:
        return not self._fault_file.exists()

    def stop(self) -> int:
        """SIGTERM. Returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE_S)

    def footprint(self) -> Footprint:
        pid = self.worker_pid()
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
        )
        return Footprint(
            pid,
            time.monotonic(),
            int(status["Threads"]),
            len(os.listdir(f"/proc/{pid}/fd")),
            int(status["VmRSS"].split()[0]) * 1024,
        )


class Soak:
    def __init__(self, plan: SoakPlan, server: SoakServer) -> None:
        self.report = SoakReport(plan)
        self._plan = plan
        self._server = server
        self._windows: list[Window] = []
        self._may_run = asyncio.Event()
        self._num_busy = 0
        self._ends_s = time.monotonic() + plan.seconds
        self._sample: list[tuple[ApiRequest, Answer]] = []
        self._rng = random.Random(plan.seed)
        self._fuzzed: Iterator[Attack] = iter(())
        self._client = self._new_client()

    def _new_client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
        return httpx.AsyncClient(
            base_url=self._server.url, timeout=httpx.Timeout(PATIENCE_S), limits=limits, trust_env=False
        )

    async def run(self) -> SoakReport:
        started_s = time.monotonic()
        clients = [
            self._converse(random.Random(f"{self._plan.seed}/{i}")) for i in range(self._plan.num_clients)
        ]
        attackers = [
            self._attack(random.Random(f"a{self._plan.seed}/{i}")) for i in range(self._plan.num_attackers)
        ]
        with self._probing() as probes, _nicer_clients(), self._fuzzing() as self._fuzzed:
            self._may_run.set()
            await asyncio.gather(*clients, *attackers, self._direct())
            await self._wait_until_idle()
            await self._replay()
        self.report.took_s = time.monotonic() - started_s
        self._read_probes(probes)
        self.report.check_footprints()
        await self._client.aclose()
        return self.report

    # -- the course ----------------------------------------------------------------------------------------

    def _goes_on(self) -> bool:
        """Until its time is over and enough has happened, which takes longer on a busy machine."""
        now_s, plan, report = time.monotonic(), self._plan, self.report
        num = min(report.outcomes["answered"], sum(report.attacks.values()))
        has_enough = num >= plan.min_answers and sum(report.faults.values()) >= plan.min_faults
        return now_s < self._ends_s or (not has_enough and now_s < self._ends_s + PATIENCE_S)

    async def _direct(self) -> None:
        """Inject faults and let the server become idle, at fixed intervals."""
        plan = self._plan
        fault_s = time.monotonic() + plan.fault_every_s
        idle_s = time.monotonic() + plan.idle_every_s
        num_faults = 0
        while self._goes_on():
            await asyncio.sleep(0.2)
            if time.monotonic() > fault_s:
                num_faults += 1
                num_deadly, is_other = divmod(num_faults, plan.deadly_every)
                kinds, number = (SURVIVED, num_faults) if is_other else (plan.deadly, num_deadly - 1)
                await self._inject(kinds[number % len(kinds)])
                fault_s = time.monotonic() + plan.fault_every_s
            if time.monotonic() > idle_s:
                await self._look_while_idle()
                idle_s = time.monotonic() + plan.idle_every_s
        await self._look_while_idle()

    async def _inject(self, fault: str) -> None:
        window = Window(fault, time.monotonic())
        self._windows.append(window)
        self.report.faults[fault] += 1
        server = self._server
        if fault == "term":
            code = await asyncio.to_thread(server.stop)
            if code != 0:
                self.report.problem(f"SIGTERM: the server ended with {code}")
            await asyncio.to_thread(server.start)
        elif fault == "kill":
            os.kill(server.worker_pid(), signal.SIGKILL)
        else:
            server.ask_for_fault(fault)
            await self._until(server.is_fault_taken, f"the fault {fault} was not taken")
        hello = ApiRequest(CHAT, {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2})
        while (outcome := (await self._ask(hello))[0]) != "answered":
            if time.monotonic() > window.begin_s + PATIENCE_S:
                self.report.problem(f"no answer after the fault {fault}: {outcome}")
                break
            await asyncio.sleep(RETRY_S)
        self.report.recovered_s.setdefault(fault, []).append(time.monotonic() - window.begin_s)
        await asyncio.sleep(SETTLE_S)
        window.end_s = time.monotonic()

    async def _look_while_idle(self) -> None:
        self._may_run.clear()
        await self._wait_until_idle()
        own, self._client = self._client, self._new_client()
        await own.aclose()  # else its connections that wait for a request would count as the server's
        await asyncio.sleep(self._plan.idle_s)
        self.report.footprints.append(await self._settled_footprint())
        self._may_run.set()

    async def _settled_footprint(self) -> Footprint:
        """A server that is slow needs a while to notice that its clients have closed their connections."""
        found, give_up_s = self._server.footprint(), time.monotonic() + PATIENCE_S
        first = next((one for one in self.report.footprints if one.pid == found.pid), found)
        while found.num_descriptors > first.num_descriptors + MORE_DESCRIPTORS:
            if time.monotonic() > give_up_s:
                break
            await asyncio.sleep(0.1)
            found = self._server.footprint()
        return found

    async def _wait_until_idle(self) -> None:
        async def is_idle() -> bool:
            if self._num_busy:
                return False
            status = (await self._client.get("/v1/status")).json()
            return not status["live_requests"] and not status["rows"]

        give_up_s = time.monotonic() + PATIENCE_S
        while not await is_idle():
            if time.monotonic() > give_up_s:
                self.report.problem(
                    f"the server did not become idle: {(await self._client.get('/v1/status')).text}"
                )
                return
            await asyncio.sleep(0.05)

    async def _until(self, happened: Any, otherwise: str) -> None:
        give_up_s = time.monotonic() + PATIENCE_S
        while not happened():
            if time.monotonic() > give_up_s:
                self.report.problem(otherwise)
                return
            await asyncio.sleep(0.02)

    # -- clients -------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        while not self._may_run.is_set():  # it may be cleared again before a client that waits goes on
            await self._may_run.wait()
        self._num_busy += 1
        try:
            yield
        finally:
            self._num_busy -= 1

    async def _converse(self, rng: random.Random) -> None:
        request: ApiRequest | None = None
        while self._goes_on():
            async with self._turn():
                request = request or new_request(rng)
                outcome, answer = await self._ask(request, rng)
            self.report.outcomes[outcome] += 1
            if outcome == "answered" and answer is not None:
                self._remember(request, answer)
                request = next_turn(request, answer, rng) if rng.random() < 0.6 else None
            else:
                request = None
                await asyncio.sleep(RETRY_S * rng.random())

    async def _ask(self, request: ApiRequest, rng: random.Random | None = None) -> tuple[str, Answer | None]:
        """What became of the request, and its answer if it is whole."""
        began_s = time.monotonic()
        try:
            if request.is_streamed:
                return await self._read_stream(request, rng or random.Random(0))
            response = await self._client.post(request.path, json=request.body)
            if response.status_code == 200:
                return "answered", self._counted(read_whole(request.path, response.json()))
            return self._refusal(
                request, response.status_code, response.text, response.headers, began_s
            ), None
        except (httpx.TransportError, httpx.StreamError) as error:
            if self._is_disturbed(began_s):
                return "disturbed", None
            self.report.problem(f"{request.path} broke off: {error!r}")
            return "broken", None

    async def _read_stream(self, request: ApiRequest, rng: random.Random) -> tuple[str, Answer | None]:
        began_s = time.monotonic()
        leaves_after = rng.randrange(1, 12) if rng.random() < 0.15 else None
        is_slow = rng.random() < 0.1
        events: list[dict[str, Any]] = []
        async with self._client.stream("POST", request.path, json=request.body) as response:
            if response.status_code != 200:
                await response.aread()
                return self._refusal(
                    request, response.status_code, response.text, response.headers, began_s
                ), None
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                events.append(json.loads(line.removeprefix("data: ")))
                if leaves_after is not None and len(events) >= leaves_after:
                    return "left", None
                if is_slow:
                    await asyncio.sleep(0.05)
        if error := next((e for e in events if "error" in e or e.get("type") == "response.failed"), None):
            if "context_length_exceeded" in json.dumps(error):  # what /v1/responses sends instead of a 400
                return "refused: too long", None
            if self._is_disturbed(began_s):
                return "disturbed", None
            self.report.problem(f"{request.path} failed in its stream: {error}")
            return "failed", None
        answer = read_events(request.path, events)
        if len(answer.ends) != request.body.get("n", 1):
            if self._is_disturbed(began_s):
                return "disturbed", None
            self.report.problem(f"{request.path} ended without an end: {events[-1:]}")
            return "failed", None
        return "answered", self._counted(answer)

    def _counted(self, answer: Answer) -> Answer:
        self.report.num_tokens += sum(map(len, answer.text.values()))  # a token is a character here
        return answer

    def _refusal(
        self, request: ApiRequest, status: int, text: str, headers: httpx.Headers, began_s: float
    ) -> str:
        if status in (429, 503) and "retry-after" in headers and "message" in text:
            return f"refused {status}"
        if status == 400 and "tokens" in text:  # a conversation that has grown past the context
            return "refused: too long"
        if self._is_disturbed(began_s):
            return "disturbed"
        self.report.problem(f"{request.path} was answered with {status}: {text} to {request.body}")
        return "failed"

    def _is_disturbed(self, began_s: float) -> bool:
        now_s = time.monotonic()
        return any(w.begin_s - SETTLE_S <= now_s and began_s <= w.end_s for w in self._windows)

    def _remember(self, request: ApiRequest, answer: Answer) -> None:
        """A sample of all answers, each as likely as any other."""
        num_seen = self.report.outcomes["answered"]
        if len(self._sample) < self._plan.num_replayed:
            self._sample.append((request, answer))
        elif (place := self._rng.randrange(num_seen)) < len(self._sample):
            self._sample[place] = (request, answer)

    async def _replay(self) -> None:
        for request, answer in self._sample:
            outcome, again = await self._ask(request.plain())
            if again is None or not same(answer, again):
                self.report.num_different += 1
                self.report.problem(f"{request} was answered with {answer}, alone with {outcome} {again}")
            self.report.num_replayed += 1

    # -- attacks -------------------------------------------------------------------------------------------

    async def _attack(self, rng: random.Random) -> None:
        while self._goes_on():
            made = (next(self._fuzzed, None) if rng.random() < FUZZED_SHARE else None) or attack(rng)
            async with self._turn():
                began_s = time.monotonic()
                status = await self._send(made.data, made.then)
            is_withstood = status in ("closed", "left") or (
                status.isdigit() and (400 <= int(status) < 500 or status in ("501", "503", "504", "505"))
            )
            if not is_withstood and not (made.may_succeed and status == "200"):
                if not self._is_disturbed(began_s):
                    self.report.problem(f"attack {made.name}: {status} to {made.data[:600]!r}")
                status = "disturbed"
            self.report.attacks[f"{made.name}: {status}"] += 1
            await asyncio.sleep(0.1 * rng.random())

    @contextlib.contextmanager
    def _fuzzing(self) -> Iterator[Iterator[Attack]]:
        """Attacks with bodies made from /openapi.json; none while the next one is not ready."""
        if not self._plan.num_fuzzed:
            yield iter(())
            return
        folder = self._server.log_path.parent
        description, path = folder / "openapi.json", folder / "bodies"
        description.write_text(httpx.get(f"{self._server.url}/openapi.json", timeout=PATIENCE_S).text)
        numbers = (str(self._plan.num_fuzzed), str(self._plan.seed))
        command = [sys.executable, str(HERE / "fuzzer.py"), str(description), str(path), *numbers]
        path.touch()
        process = subprocess.Popen(command)
        try:
            with open(path) as file:
                yield FuzzedBodies(file)
        finally:
            process.kill()
            process.wait()

    async def _send(self, data: bytes, then: str) -> str:
        """The status of the answer, or "closed", "left", "open": still open after a long time."""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._server.port)
        except OSError:
            return "closed"
        try:
            writer.write(data)
            if then == "leave":
                await writer.drain()
                return "left"
            line = await asyncio.wait_for(self._first_line(reader, writer), PATIENCE_S)
            return line.split()[1].decode() if line.startswith(b"HTTP/") else "closed"
        except TimeoutError:
            return "open"
        except OSError:
            return "closed"
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _first_line(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        """A server may answer, and close, before it has read all of a large body."""
        with contextlib.suppress(OSError):
            await writer.drain()
        line = await reader.readline()
        with contextlib.suppress(OSError):
            while await reader.read(65536):
                pass
        return line

    # -- health --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _probing(self) -> Iterator[Path]:
        path = self._server.log_path.with_name("probes")
        command = [sys.executable, str(HERE / "prober.py"), "127.0.0.1", str(self._server.port), str(path)]
        process = subprocess.Popen(command)
        try:
            yield path
        finally:
            process.kill()
            process.wait()

    def _read_probes(self, path: Path) -> None:
        deadly = [w for w in self._windows if w.fault in DEADLY]
        for line in path.read_text().splitlines():
            at, status, took = line.split()
            if any(w.begin_s - SETTLE_S <= float(at) <= w.end_s for w in deadly):
                continue
            self.report.health_s.append(float(took))
            if status != "200":
                self.report.problem(f"/health/live was answered with {status} while the server was alive")


@contextlib.contextmanager
def _nicer_clients() -> Iterator[None]:
    """This process leaves the CPU to the server, as clients on other machines do. Only root can undo it."""
    if os.geteuid() != 0:
        yield
        return
    before = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, 0, before + CLIENTS_NICE)
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, before)


class FuzzedBodies(Iterator[Attack]):
    """The bodies in a file that still grows."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._rest = ""

    def __next__(self) -> Attack:
        self._rest += self._file.readline()
        if not self._rest.endswith("\n"):
            raise StopIteration
        path, body = json.loads(self._rest)
        self._rest = ""
        return Attack("fuzzed_body", posted(path, body), may_succeed=True)
