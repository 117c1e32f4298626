"""Rounds with servers that answer, crash and do not start: nothing of this ends the comparison."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from benchmarks.native_mtp.loads import Load
from benchmarks.native_mtp.measured import MAX_RESTARTS, MeasuredServer
from benchmarks.native_mtp.rounds import Rounds, Subject, equal_to_first
from benchmarks.server_process import DidNotStart, Peer

from outrider.bench.workloads import Task

# Answers with the prompt in capitals, one chunk for each letter. "die" in a prompt ends the process. With MTP
# it adds a letter to prompts that begin with w, as a server with a wrong rollback might.
SERVER = """
import http.server, json, os, sys
has_mtp, dies = sys.argv[2] == "mtp", sys.argv[3] == "dies"
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *words): pass
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        prompt = body["messages"][-1]["content"]
        if dies and "die" in prompt and body["max_tokens"] > 8:
            print("out of luck", flush=True); os._exit(3)
        self.send_response(200); self.send_header("content-type", "text/event-stream"); self.end_headers()
        text = prompt.upper() + ("!" if has_mtp and prompt[0] == "w" else "")
        chunks = [{"choices": [{"delta": {"content": letter}}]} for letter in text]
        chunks.append({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        for chunk in chunks:
            self.wfile.write(f"data: {json.dumps(chunk)}\\n\\n".encode())
        self.wfile.write(b"data: [DONE]\\n\\n")
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def server(stack: ExitStack, logs: Path, has_mtp: bool, dies: bool = False) -> MeasuredServer:
    script = logs / "server.py"
    script.write_text(SERVER)
    words = [str(script), "PORT", "mtp" if has_mtp else "plain", "dies" if dies else "lives"]
    peer = Peer(f"fake {has_mtp}", [sys.executable, *words])
    form = MeasuredServer(peer, has_mtp, "model", logs, timeout_s=20)
    stack.callback(form.stop)
    form.start()
    form.wait()
    return form


def run(subjects: list[Subject], prompts: list[str], loads: list[Load], num_rounds: int) -> Rounds:
    lines: list[str] = []
    rounds = Rounds(subjects, loads, [Task(text) for text in prompts], 64, len, lines.append)

    async def measure() -> None:
        await rounds.answer_alone()
        for index in range(num_rounds):
            await rounds.run(index)

    asyncio.run(measure())
    assert lines
    return rounds


def test_a_wrong_answer_is_found_at_every_load(stack: ExitStack, tmp_path: Path) -> None:
    subject = Subject("fake", "", [server(stack, tmp_path, True), server(stack, tmp_path, False)])
    loads = [Load(1), Load(2), Load(2, joins=True)]
    rounds = run([subject], ["right", "wrong", "round", "what"], loads, 2)
    drafting = [cell for cell in rounds.cells if cell.has_mtp]
    assert len(drafting) == len(rounds.cells) / 2 == 2 * len(loads)
    assert {(cell.num_equal, cell.num_answers) for cell in drafting} == {(2, 4)}
    assert {cell.num_equal for cell in rounds.cells if not cell.has_mtp} == {4}
    assert not any(cell.errors or cell.has_crashed for cell in rounds.cells)
    tokens = {cell.has_mtp: cell.num_tokens for cell in rounds.cells}
    assert tokens == {True: len("rightwrong!roundwhat!"), False: len("rightwrongroundwhat")}
    assert rounds.expected_s() > 0


def test_a_server_that_crashes_is_started_again_until_it_is_given_up(
    stack: ExitStack, tmp_path: Path
) -> None:
    subject = Subject("fake", "", [server(stack, tmp_path, True, dies=True), server(stack, tmp_path, False)])
    rounds = run([subject], ["die", "b", "c", "d"], [Load(1)], MAX_RESTARTS + 2)
    drafting = [cell for cell in rounds.cells if cell.has_mtp]
    assert len(drafting) == MAX_RESTARTS + 1  # then given up
    assert all(cell.has_crashed and cell.errors for cell in drafting)
    assert [cell.num_equal for cell in rounds.cells if not cell.has_mtp] == [4] * (MAX_RESTARTS + 2)
    assert [form.has_mtp for form in subject.forms] == [False]
    assert subject.problems == [f"fake True: given up after {MAX_RESTARTS} restarts. out of luck"]


def test_a_server_that_cannot_start_says_why_in_its_last_line(tmp_path: Path) -> None:
    peer = Peer("broken", [sys.executable, "-c", "raise SystemExit('no module named metal')"])
    form = MeasuredServer(peer, True, "model", tmp_path, timeout_s=1)
    form.start()
    with pytest.raises(DidNotStart, match="broken did not start"):
        form.wait()
    assert form.last_words() == "no module named metal"
    form.stop()


def test_plain_answers_are_compared_between_servers() -> None:
    ours = Subject("ours", alone={"a": "1", "b": "2"})
    theirs = Subject("theirs", alone={"a": "1", "b": "3"})
    assert equal_to_first([ours, theirs, Subject("failed")]) == {"theirs": (1, 2)}
