"""`outrider`, whose model plays a script: SCRIPT=FILE [RECORDS=FOLDER] python scripted_outrider.py serve …

The script is read anew for every answer. With RECORDS, each request to the API is written into the folder.
"""

from __future__ import annotations

import itertools
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import outrider  # noqa: F401  # settings that must come before mlx is used

import mlx.core as mx  # isort: skip

import script
from scripted_runner import OFF_SCRIPT_FILE, Pieces, ScriptedRunner


def install(script_file: Path) -> None:
    """Every model that is loaded from now on plays the script."""
    from outrider import build

    load = build.loader.load
    tokenizers: list[Any] = []

    def noted_load(*args: Any, **named: Any) -> Any:
        loaded = load(*args, **named)
        tokenizers.append(loaded.tokenizer)
        return loaded

    def new_runner(*_: Any, **__: Any) -> ScriptedRunner:
        def play(prompt: str) -> str:
            return script.answer(script.read(script_file), prompt)

        def report(line: str) -> None:
            with open(script_file.parent / OFF_SCRIPT_FILE, "a") as file:
                file.write(line + "\n")

        return ScriptedRunner(Pieces(tokenizers[-1]), play, report)

    build.loader.load = noted_load  # type: ignore[assignment]
    build.Runner = new_runner  # type: ignore[assignment, misc]


class Recorder:
    """An ASGI application in front of the server's: writes every request with a body into a folder."""

    def __init__(self, app: Any, folder: Path) -> None:
        self._app = app
        self._folder = folder
        self._numbers = itertools.count()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        body, status, number = bytearray(), 0, next(self._numbers)

        async def noted_receive() -> Any:
            message = await receive()
            body.extend(message.get("body") or b"")
            return message

        async def noted_send(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                self._write(number, scope, status, body)  # before the client knows that its answer has ended
            await send(message)

        await self._app(scope, noted_receive, noted_send)

    def _write(self, number: int, scope: Any, status: int, body: bytearray) -> None:
        record = {
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "headers": {name.decode(): value.decode() for name, value in scope["headers"]},
            "body": json.loads(body) if body else None,
        }
        unfinished = self._folder / f"{number:04}.part"
        unfinished.write_text(json.dumps(record))
        unfinished.rename(self._folder / f"{number:04}.json")


def record(folder: Path) -> None:
    from outrider.cli import http_server

    http_config = http_server.http_config

    def recording_config(app: Any, *args: Any) -> Any:
        return http_config(Recorder(app, folder), *args)

    http_server.http_config = recording_config


if __name__ == "__main__":
    mx.set_default_device(mx.cpu)
    install(Path(os.environ["SCRIPT"]))
    if "RECORDS" in os.environ:
        record(Path(os.environ["RECORDS"]))
    sys.path[0] = str(Path(__file__).parent)
    runpy.run_module("outrider", run_name="__main__", alter_sys=True)
