"""Settings of a serving process, in a process of their own: they cannot be undone."""

from __future__ import annotations

import json
import platform
import subprocess
import sys

import pytest

from outrider.cli.process_settings import SWITCH_S
from patience import PATIENCE_S

# How many bytes are mapped by themselves when 20 MB are held, after such a piece was held and freed before.
PROGRAM = """
import ctypes, json, sys
from outrider.cli.process_settings import settle_process

NAMES = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in NAMES]
libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info

if sys.argv[1] == "settled":
    settle_process()
piece = bytearray(20_000_000)
del piece
before = libc.mallinfo2().hblkhd
piece = bytearray(19_000_000)
print(json.dumps({"mapped": libc.mallinfo2().hblkhd - before, "switch_s": sys.getswitchinterval()}))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_large_pieces_of_memory_are_given_back_and_threads_switch_often() -> None:
    settled, default = (_found(how) for how in ("settled", "default"))
    assert settled["mapped"] >= 19_000_000
    assert default["mapped"] == 0, "glibc does this by itself now: the setting can go"
    assert settled["switch_s"] == pytest.approx(SWITCH_S)


def _found(how: str) -> dict[str, float]:
    command = [sys.executable, "-c", PROGRAM, how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found
