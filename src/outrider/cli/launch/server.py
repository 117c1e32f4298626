"""The server that a launched tool uses: one that runs already, or one that is started and stopped again."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx

from outrider.config import InvalidConfig
from outrider.server_address import ServerAddress

DEFAULT_URL = "http://127.0.0.1:8000"
ANSWER_S = 10.0  # seconds for a list of models; chosen by hand
LOOK_S = 0.1  # between two looks at a server that is starting; chosen by hand
STOP_S = 60.0  # from SIGTERM until the server is killed: longer than its own drain and hard end


@dataclass(frozen=True)
class ServedModel:
    name: str
    context: int | None
    reads_images: bool


class OtherServer(Exception):
    """Something answers, and it is not Outrider."""


def served_models(address: ServerAddress) -> list[ServedModel] | None:
    """None: nothing listens there. Raises OtherServer, or InvalidConfig with what to do."""
    headers = {"Authorization": f"Bearer {address.api_key}"} if address.api_key else {}
    try:
        answer = httpx.get(f"{address}/v1/models", headers=headers, timeout=ANSWER_S, trust_env=False)
    except (httpx.ConnectError, httpx.ConnectTimeout):
        return None
    except httpx.TimeoutException:
        raise InvalidConfig(
            f"{address} accepts connections and does not answer: if it is loading its model, try again later"
        ) from None
    except httpx.TransportError as error:
        raise OtherServer(f"{address} does not speak HTTP: {error}") from None
    if answer.status_code in (401, 403):
        raise InvalidConfig(f"{address} needs a key: give --api-key KEY, or set OUTRIDER_API_KEY")
    try:
        entries = answer.json()["data"]
        found = [
            ServedModel(entry["id"], entry["max_model_len"], "image" in entry["input_modalities"])
            for entry in entries
            if entry["owned_by"] == "outrider"
        ]
    except (ValueError, LookupError, TypeError):
        found = []
    if not found:
        raise OtherServer(f"{address} answers, and it is not an Outrider server")
    return found


def serve_command(model: str | None) -> list[str]:
    return [sys.executable, "-m", "outrider", "serve", *([model] if model else []), "--port", "0"]


@contextlib.contextmanager
def started(command: Sequence[str], log_file: Path, show: IO[str]) -> Iterator[str]:
    """Runs a server until the block is left. Yields its address once it is ready.

    It has a session of its own: a Ctrl-C is for the tool, which may only end its own answer on it.
    """
    with open(log_file, "wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield _wait_until_ready(process, log_file, show)
    finally:
        _stop(process)


def _wait_until_ready(process: subprocess.Popen[bytes], log_file: Path, show: IO[str]) -> str:
    with open(log_file, errors="replace") as log:
        last = ""
        while True:
            has_ended = process.poll() is not None  # before the read: nothing is written after it
            text = log.read()
            show.write(text)
            show.flush()
            *lines, last = (last + text).split("\n")
            for line in lines:
                if line.startswith("Ready: "):
                    return line.removeprefix("Ready: ").strip()
            if has_ended:
                raise InvalidConfig(f"the server did not start: it ended with status {process.returncode}")
            time.sleep(LOOK_S)


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
