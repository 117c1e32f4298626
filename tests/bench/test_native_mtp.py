"""The comparison of native MTP: loads, equal answers, the table, commands of the servers."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from benchmarks.native_mtp import drafts, kinds
from benchmarks.native_mtp.loads import JOIN_AFTER_CHUNKS, Load, loads_of, send
from benchmarks.native_mtp.results import Cell, figures, unequal
from benchmarks.native_mtp.table import COLUMNS, table

from outrider.bench.answer import Answer
from outrider.bench.workloads import Task

OURS, THEIRS = "Outrider 1", "other 2"


# -- loads -----------------------------------------------------------------------------------------------


class FakeServer:
    """Gives each answer in `num_chunks` chunks, one for each turn of the event loop."""

    def __init__(self, num_chunks: int = 5 * JOIN_AFTER_CHUNKS) -> None:
        self.num_chunks = num_chunks
        self.decoding: set[str] = set()
        self.began_beside: dict[str, set[str]] = {}  # who was decoding when a request began

    async def ask(self, task: Task, on_text: Callable[[], None]) -> Answer:
        self.began_beside[task.prompt] = set(self.decoding)
        for _ in range(self.num_chunks):
            await asyncio.sleep(0)
            self.decoding.add(task.prompt)
            on_text()
        self.decoding.discard(task.prompt)
        return Answer(task.kind, 0.0, 1.0, text=task.prompt.upper())


def sent(load: Load, server: FakeServer) -> list[Answer]:
    tasks = [Task(f"p{i}") for i in range(load.num_requests)]
    return asyncio.run(send(load, server.ask, tasks))


@pytest.mark.parametrize("load", [Load(1), Load(3), Load(8), Load(2, joins=True), Load(4, joins=True)])
def test_answers_come_in_the_order_of_the_questions(load: Load) -> None:
    answers = sent(load, FakeServer())
    assert [answer.text for answer in answers] == [f"P{i}" for i in range(load.num_requests)]


def test_requests_at_once_begin_beside_nobody_who_decodes() -> None:
    server = FakeServer()
    sent(Load(2), server)
    assert all(not beside for beside in server.began_beside.values())


def test_requests_that_join_begin_while_others_decode() -> None:
    server = FakeServer()
    sent(Load(4, joins=True), server)
    assert [len(server.began_beside[f"p{i}"]) for i in range(4)] == [0, 1, 2, 3]
    assert all(1 <= len(server.began_beside[f"p{i}"]) <= 3 for i in range(4, 8))


def test_a_server_that_sends_whole_answers_is_joined_too() -> None:
    server = FakeServer(num_chunks=1)
    assert len(sent(Load(3, joins=True), server)) == 6


def test_streams_that_find_no_request_left_end() -> None:
    async def ask(task: Task, on_text: Callable[[], None]) -> Answer:
        return Answer("free", 0.0, 1.0, text=task.prompt)

    tasks = [Task(f"question {i}") for i in range(16)]
    answers = asyncio.run(asyncio.wait_for(send(Load(8, joins=True), ask, tasks), 20))
    assert [answer.text for answer in answers] == [task.prompt for task in tasks]


def test_one_stream_has_nobody_to_join() -> None:
    assert [load.text for load in loads_of([1, 2])] == [
        "1 stream",
        "2 streams, at once",
        "2 streams, joining",
    ]


# -- equal answers ---------------------------------------------------------------------------------------


def test_only_answers_without_error_can_be_equal() -> None:
    tasks = [Task("a"), Task("b"), Task("c"), Task("d")]
    answers = [
        Answer("free", 0, 1, text="x"),
        Answer("free", 0, 1, text="other"),
        Answer("free", 0, 1, text="z", error="broke off"),
        Answer("free", 0, 1, text=""),
    ]
    found = unequal(tasks, answers, {"a": "x", "b": "y", "c": "z"})
    assert found == (("b", "other"), ("d", ""))  # "d" has no plain answer alone
    assert Cell(OURS, True, Load(4), 0, 1.0, 9, 4, found, ("broke off",)).num_equal == 1


# -- figures and table -----------------------------------------------------------------------------------


def cell(server: str, has_mtp: bool, round: int, speed: float, wrong: int = 0, **more: Any) -> Cell:
    """Of four answers."""
    return Cell(server, has_mtp, Load(1), round, 2.0, int(2 * speed), 4, (("p", "x"),) * wrong, **more)


def test_ratios_are_taken_within_a_round() -> None:
    cells = [cell(OURS, True, 0, 100), cell(OURS, True, 1, 30)]
    cells += [cell(OURS, False, 0, 50), cell(OURS, False, 1, 10), cell(OURS, False, 2, 1)]
    found = figures(cells, OURS, Load(1))
    assert found.ratio is not None
    assert (found.ratio.least, found.ratio.most) == (2.0, 3.0)
    assert found.equal_with_mtp == (8, 8)
    assert found.equal_plain == (12, 12)


def rows(
    cells: list[Cell], problems: list[tuple[str, str]], loads: list[Load] | None = None
) -> list[list[str]]:
    lines = table(cells, [OURS, THEIRS], loads or [Load(1)], problems).splitlines()
    found = [[part.strip() for part in line.strip("|").split("|")] for line in lines]
    assert {len(row) for row in found} == {len(COLUMNS)}
    return found[2:]


def test_the_table_has_a_row_for_each_server_at_each_load() -> None:
    cells = [cell(OURS, True, 0, 100), cell(OURS, False, 0, 50), cell(THEIRS, True, 0, 80, wrong=1)]
    cells.append(cell(THEIRS, False, 0, 40))
    assert rows(cells, []) == [
        ["1 stream", OURS, "100", "50", "2.00", "-", "4 of 4", "4 of 4", "0"],
        ["", THEIRS, "80", "40", "2.00", "1.25", "3 of 4", "4 of 4", "0"],
    ]


def test_ratios_of_several_rounds_show_their_spread() -> None:
    cells = [cell(OURS, True, i, speed) for i, speed in enumerate((50, 100, 150))]
    cells += [cell(OURS, False, i, 50) for i in range(3)]
    assert rows(cells, [])[0][4] == "2.00 (1.00-3.00)"


def test_errors_and_crashes_are_counted() -> None:
    errors = ("hung up",) * 3
    cells = [cell(THEIRS, True, 0, 0, wrong=1, errors=errors, has_crashed=True), cell(THEIRS, False, 0, 40)]
    assert rows(cells, []) == [
        ["1 stream", THEIRS, "-", "40", "-", "-", "0 of 4", "4 of 4", "3 x hung up; 1 crashes"]
    ]


def test_a_server_that_does_not_start_is_a_row_with_the_reason() -> None:
    found = rows([cell(OURS, True, 0, 100)], [(THEIRS, "no module\nnamed a|b")])
    assert found[-1] == ["all", THEIRS, "-", "-", "-", "-", "-", "-", "no module named a/b"]


def test_a_load_without_cells_has_no_row() -> None:
    assert len(rows([cell(OURS, True, 0, 1)], [], [Load(1), Load(2)])) == 1


# -- commands --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", kinds.PEERS)
def test_a_peer_is_started_with_the_same_words_but_for_mtp(name: str) -> None:
    kind = kinds.PEERS[name]
    both = [kinds.peer_of(kind, "py", Path("/m"), 8, has_mtp, {"HOME": "h"}) for has_mtp in (True, False)]
    drafting, plain = both
    assert drafting.command[:2] == plain.command[:2] == ["py", str(kinds.MLX_LAUNCHER)]
    assert drafting.command != plain.command
    assert drafting.name != plain.name  # their logs are files of their own
    for peer in both:
        assert "PORT" in peer.command
        assert not [word for word in peer.command if "FOLDER" in word or "ROWS" in word]
        assert peer.environ == {"HOME": "h"}


@pytest.mark.parametrize(("name", "is_continuous"), [("rapid-mlx", False), ("rapid-mlx-forced", True)])
def test_rapid_mlx_gets_a_json_object(name: str, is_continuous: bool) -> None:
    command = kinds.peer_of(kinds.PEERS[name], "py", Path("/m"), 8, True, {}).command
    found = json.loads(command[command.index("--speculative-config") + 1])
    assert found["model"] == "/m"
    assert found.get("continuous_batching", False) is is_continuous
    assert ("--force-spec-decode" in command) is is_continuous


def test_a_choice_names_a_server_and_its_python() -> None:
    assert kinds.read_choice("mlx-vlm") == ("mlx-vlm", sys.executable)
    assert kinds.read_choice("vllm-mlx=/venv/bin/python") == ("vllm-mlx", "/venv/bin/python")
    with pytest.raises(ValueError, match="nothing: unknown server; known are vllm-mlx"):
        kinds.read_choice("nothing=x")


def test_a_missing_package_has_no_version() -> None:
    assert kinds.version_of(kinds.Kind("x", "no-such-package-at-all", (), ()), sys.executable) is None
    assert kinds.version_of(kinds.OUTRIDER, "/no/such/python") is None


# -- drafts ----------------------------------------------------------------------------------------------


def answering(*pages: tuple[str, str]) -> httpx.Client:
    """A client of a server that has these pages."""
    texts = dict(pages)
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text=texts[request.url.path]))
    return httpx.Client(base_url="http://server", transport=transport)


def test_counts_of_drafts_are_read_as_each_server_reports_them() -> None:
    metrics = "\n".join(
        (
            'outrider_drafted_tokens_total{position="1"} 5',
            'outrider_drafted_tokens_total{position="2"} 4',
            'outrider_accepted_tokens_total{position="1"} 3',
            'outrider_accepted_tokens_total{position="2"} 1',
        )
    )
    assert drafts.of_outrider(answering(("/metrics", metrics)), "m") == (9, 4)
    status = '{"mtp": {"enabled": true, "attempted": 7, "accepted": 6}}'
    assert drafts.of_vllm_mlx(answering(("/v1/status", status)), "m") == (7, 6)
    assert drafts.of_vllm_mlx(answering(("/v1/status", '{"mtp": {"enabled": false}}')), "m") == (0, 0)
    timings = '{"timings": {"draft_n": 12, "draft_n_accepted": 8}}'
    assert drafts.of_mlx_vlm(answering(("/v1/chat/completions", timings)), "m") == (12, 8)
    rapid = (
        '# HELP x\nrapid_mlx_spec_decode_attempts_total{family="m",method="mtp"} 10\n'
        'rapid_mlx_spec_decode_accepts_total{family="m",method="mtp"} 4\n'
    )
    assert drafts.of_rapid_mlx(answering(("/metrics", rapid)), "m") == (10, 4)


def test_a_server_that_ignores_the_flag_is_named() -> None:
    assert "has made no drafts" in drafts.drafts_text("x 1", (0, 0))
    assert drafts.drafts_text("x 1", (8, 6)) == "x 1 reports 8 drafts, of which 75% were accepted."
    assert drafts.report("unknown-package", 1, "m") is None
