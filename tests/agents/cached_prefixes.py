"""Prints what the prefix cache has of the recorded prompts: the figures of docs/AGENTS.md.

PYTHONPATH=src:tests python tests/agents/cached_prefixes.py TOKENIZER_JSON
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import httpx
import recorded
from test_recorded_requests import replay
from workplace import scripted_server

from patience import PATIENCE_S


def main() -> None:
    folder = tempfile.TemporaryDirectory()
    with folder, scripted_server(Path(folder.name), vocabulary=Path(sys.argv[1])) as server:
        for name in recorded.names():
            httpx.delete(f"{server.url}/v1/cache", timeout=PATIENCE_S).raise_for_status()
            (first, _), *later = replay(server, recorded.load(name))
            share = sum(cached for _, cached in later) / max(1, sum(prompt for prompt, _ in later))
            turns = ", ".join(f"{cached:,} of {prompt:,}" for prompt, cached in later)
            print(f"{name}: first {first:,}, cached {share:.1%}: {turns}")


if __name__ == "__main__":
    main()
