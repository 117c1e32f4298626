"""One rank without a model, for tests/cli/test_rank_links.py: `python rank_program.py RANK RANKS TIMEOUT_S`.

Rank 0 prints its address as JSON, then "connected". It reads commands from stdin: "wake", "begin". The others
get the address as further arguments, and print "awake" each time that they are woken. Every rank prints the
reason of a loss and ends with status 70.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from outrider.cli.rank_links import Address, Meeting, RankLinks, connect


def say(what: Any) -> None:
    print(json.dumps(what), flush=True)


def end(reason: str) -> None:
    say(reason)
    os._exit(70)


def main(rank: int, num_ranks: int, timeout_s: float, *address: str) -> None:
    if rank > 0:
        links = RankLinks(connect(Address(address[0], int(address[1]), address[2]), rank), timeout_s, end)
        while True:
            links.wait()
            say("awake")
    meeting = Meeting("127.0.0.1")
    say([meeting.address.host, str(meeting.address.port), meeting.address.token])
    links = RankLinks(meeting.connections(num_ranks, timeout_s=240), timeout_s, end)
    say("connected")
    for line in sys.stdin:
        getattr(links, line.strip())()
        say("done")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), *sys.argv[4:])
