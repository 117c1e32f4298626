"""`outrider bench` as a user runs it."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from outrider.cli.bench import _split_name
from outrider.cli.main import main
from patience import PATIENCE_S, case_only_in_soak
from scripted_server import refuses, scripted, stream
from server_process import environment, write_tiny_model

SHORT = ("--workloads", "chat", "--streams", "2", "--rounds", "2", "--requests", "1", "--max-tokens", "8")
PLENTY = {"completion_tokens": 3, "prompt_tokens": 5}


def outrider(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "outrider", "bench", *args],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=environment(),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def test_in_process(folder: Path, tmp_path: Path) -> None:
    files = "--json", str(tmp_path / "b.json"), "--plot", str(tmp_path / "b.svg")
    result = outrider(str(folder), *SHORT, *files, "--depths", "auto", "2")
    assert result.returncode == 0, result.stderr
    assert "variants, in turns: off, auto, depth 2" in result.stdout
    assert re.search(r"^ +depth 2 +\d+\.\d \(", result.stdout, re.MULTILINE)
    assert "off and depth 2 gave the same text in 4 of 4 answers." in result.stdout
    assert json.loads((tmp_path / "b.json").read_text())["is_complete"] is True
    assert "<svg" in (tmp_path / "b.svg").read_text()
    assert "Measuring: 0/12 answers" in result.stderr


def test_over_http_with_a_server_of_its_own(folder: Path) -> None:
    result = outrider(str(folder), "--http", *SHORT, "--depths", "1")
    assert result.returncode == 0, result.stderr
    assert re.search(r"outrider: .*tiny at http://127\.0\.0\.1:\d+, float32 on cpu", result.stdout)
    assert "off and depth 1 gave the same text in 4 of 4 answers." in result.stdout


def test_two_servers_in_turns() -> None:
    def reply(usage: dict[str, int] | None) -> list:
        return [stream({"content": "Hello"}, {"content": " you"}, usage=usage) for _ in range(9)]

    with scripted(reply(PLENTY)) as one, scripted(reply(None)) as other:
        urls = "--url", f"one={one.url}", "--url", f"other={other.url}/v1", "--baseline", "other"
        result = outrider("m", *urls, *SHORT)
        assert result.returncode == 0, result.stderr
        assert {body["model"] for body in (*one.bodies, *other.bodies)} == {"m"}
        assert not any("draft_depth" in body for body in one.bodies)
    assert "/ other" in result.stdout
    assert "other: the server sent no usage, so each chunk was counted as one token." in result.stdout


def test_a_variant_that_fails_at_a_case_shows_its_error_and_sets_the_exit_status() -> None:
    good = [stream({"content": "Hello"}, usage=PLENTY) for _ in range(3)]
    with scripted([*good, refuses(500, "out of memory"), refuses(500, "out of memory")]) as server:
        result = outrider("m", "--url", server.url, *SHORT)
    assert result.returncode == 1
    assert "2 failed: the server answered 500: out of memory" in result.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--workloads", "poetry"], "there is no 'poetry'"),
        (["--streams", "0"], "--streams: 0"),
        (["--workloads", "long", "--prompt-tokens", "9"], "--prompt-tokens: 9"),
        (["--depths", "0"], "depth 0 is always measured"),
        (["--depths", "deep"], "'deep' is not auto or a number"),
        (["--url", "127.0.0.1:9"], "cannot reach http://127.0.0.1:9"),
        (["--url", "ftp://h"], "not an address like"),
        (["--url", "http://h", "--http"], "give one of them"),
        (["--url", "http://h", "--drafter", "ngram"], "--drafter is for a model loaded here"),
        (["--api-key", "k"], "--api-key is for a running server"),
        (["--pid", "1"], "1 --pid for 0 --url"),
        (["--plot", "x.pdf"], "ends with .svg or .png"),
        (["--json", "no/such/folder/x.json"], "this file cannot be written"),
        (["no/such/folder"], "no such folder"),
        (["no/such/folder", "--http"], "no such folder"),
        (["FOLDER", "--baseline", "on"], "--baseline 'on' is not one of the variants: off, auto"),
        (["FOLDER", "--head", "none.safetensors"], "no such head file"),
        (["--quick", "--full"], "not allowed with"),
    ],
)
def test_bad_input_is_one_clear_line(
    folder: Path, args: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert exit_status_of(*[str(folder) if arg == "FOLDER" else arg for arg in args]) == 2
    said = capfd.readouterr().err  # by this process, and by the server of --http
    assert message in said
    assert "Traceback" not in said


def test_two_servers_need_two_names(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted([]) as server:
        assert exit_status_of("--url", server.url, "--url", server.url) == 2
    assert "give them names, --url NAME=URL" in capsys.readouterr().err


def exit_status_of(*args: str) -> int:
    """Of `outrider bench` in this process, which spares the imports of a new one."""
    try:
        return main(["bench", *args])
    except SystemExit as left:  # the parser's own errors
        return int(left.code or 0)


@pytest.mark.parametrize(
    ("given", "name", "url"),
    [
        ("http://h:1", None, "http://h:1"),
        ("ours=http://h:1", "ours", "http://h:1"),
        ("mlx-lm=h:1/v1", "mlx-lm", "h:1/v1"),
        ("http://h/?a=b", None, "http://h/?a=b"),
        ("h:1/a=b", None, "h:1/a=b"),
    ],
)
def test_names_before_urls(given: str, name: str | None, url: str) -> None:
    assert _split_name(given) == (name, url)


def _read_until(terminal: int, text: str) -> str:
    """What came up to the text and with it."""
    seen, give_up_s = "", time.monotonic() + PATIENCE_S
    while text not in seen:
        assert time.monotonic() < give_up_s, seen
        assert select.select([terminal], [], [], PATIENCE_S)[0], seen
        seen += os.read(terminal, 65536).decode(errors="replace")
    return seen


@pytest.mark.parametrize(
    ("http", "number"),
    [(False, signal.SIGINT), case_only_in_soak(True, signal.SIGINT), (True, signal.SIGTERM)],
)
def test_ctrl_c_prints_the_figures_so_far_and_leaves_no_server(
    folder: Path, tmp_path: Path, http: bool, number: signal.Signals
) -> None:
    file = tmp_path / "b.json"
    many = [*SHORT, "--rounds", "5000", "--json", str(file)]
    terminal, its_end = pty.openpty()  # where the bar shows which round is under way
    process = subprocess.Popen(
        [sys.executable, "-m", "outrider", "bench", str(folder), *many, *(["--http"] if http else [])],
        stdout=subprocess.PIPE,
        stderr=its_end,
        text=True,
        env=os.environ | {"COLUMNS": "200"},
    )
    os.close(its_end)
    err = _read_until(terminal, "round 3")
    process.send_signal(number)
    with contextlib.suppress(OSError):  # Linux's sign for the end of a terminal
        while more := os.read(terminal, 65536):
            err += more.decode(errors="replace")
    os.close(terminal)
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, err
    assert "Interrupted. These are the figures so far." in out
    assert "tokens/s" in out
    assert "Traceback" not in err
    found = json.loads(file.read_text())
    assert found["is_complete"] is False
    assert 0 < len(found["cases"][0]["rounds"]) < 10_000
    if http:
        with pytest.raises(OSError, match="refused"):
            urllib.request.urlopen(found["targets"]["outrider"]["url"] + "/health", timeout=PATIENCE_S)
