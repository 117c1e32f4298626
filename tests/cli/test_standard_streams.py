"""Standard streams that are closed, or that nobody reads. In real processes: pytest has its own streams."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Says on stderr or by its exit status what went wrong; a broken stream at the end of Python gives 120.
CODE = """
import socket, subprocess, sys
from outrider.cli.standard_streams import keep_standard_streams
keep_standard_streams()
with socket.socket() as one:
    assert one.fileno() > 2, "a socket has the number of a standard stream"
print("a line", flush=True)
print("a line", file=sys.stderr)
print("no line break", end="")
child = "import sys; print('a line'); sys.exit(sys.stdout is None)"
sys.exit(subprocess.run([sys.executable, "-c", child], stderr=subprocess.DEVNULL).returncode)
"""


def run(redirections: str, code: str = CODE) -> subprocess.CompletedProcess[str]:
    command = ["sh", "-c", f'"$0" -c "$1" {redirections}', sys.executable, code]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("redirections", ["<&- >&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_sockets(redirections: str) -> None:
    done = run(redirections)
    assert done.returncode == 0, done.stderr


def test_output_that_nobody_reads_is_dropped() -> None:
    code = CODE.partition("child =")[0]
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait() == 0


def test_output_is_as_before() -> None:
    done = run("", CODE.partition("child =")[0])
    assert (done.returncode, done.stdout, done.stderr) == (0, "a line\nno line break", "a line\n")
