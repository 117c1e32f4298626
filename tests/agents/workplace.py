"""Where the programs work: a server with a scripted model, a folder with a file to mend, an empty home."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import script
from agent_model import write_agent_model
from scripted_runner import OFF_SCRIPT_FILE

from outrider.cli.launch import TOOLS
from server_process import ServerProcess, serving

HERE = Path(__file__).parent
INSTALLED = os.environ.get("AGENT_TOOLS")  # the folder of .ci/agents
SMALL_CONTEXT = 45_000  # tokens of the tiny vocabulary; Claude Code's prompt takes 28,000
RUN_S = 300.0  # seconds for one run of a program; only a guard
FLAGS = (
    *("--draft-depth", "0"),  # nothing is measured
    *("--prefill-step-size", "4096", "--memory-budget", "4GiB", "--prefix-cache-bytes", "1GiB"),
    *("--log-level", "warning"),
)


@dataclass
class AgentServer:
    """A real server process whose model plays a script. Keeps what it was asked."""

    process: ServerProcess
    script_file: Path
    records_folder: Path
    scenes: Sequence[script.Scene] = ()
    num_read: int = 0

    @property
    def url(self) -> str:
        return self.process.url

    def play(self, *scenes: script.Scene) -> None:
        self.scenes = scenes
        script.write(self.script_file, scenes)
        self.num_read = len(self._files())

    def records(self) -> list[dict[str, Any]]:
        """The requests with a body since `play`, with their status, in the order in which they came."""
        found = [json.loads(file.read_text()) for file in self._files()[self.num_read :]]
        return [record for record in found if record["body"] is not None]

    def off_script(self) -> str:
        """Where a grammar has forbidden what the script says."""
        file = self.script_file.parent / OFF_SCRIPT_FILE
        return file.read_text() if file.exists() else ""

    def forget_off_script(self) -> None:
        (self.script_file.parent / OFF_SCRIPT_FILE).unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        return sorted(self.records_folder.glob("*.json"))


@contextlib.contextmanager
def scripted_server(folder: Path, *flags: str, **model: Any) -> Iterator[AgentServer]:
    """The server, with the script and the records in `folder`."""
    records, file = folder / "records", folder / "script.json"
    records.mkdir()
    script.write(file, [])
    path = write_agent_model(folder / "agent-model", **model)
    program = (str(HERE / "scripted_outrider.py"),)
    variables = {"SCRIPT": str(file), "RECORDS": str(records)}
    with serving(path, *FLAGS, *flags, program=program, **variables) as process:
        yield AgentServer(process, file, records)


@dataclass
class Ended:
    status: int
    output: str
    errors: str


@dataclass
class Workplace:
    """A folder with a small program to mend, and a home without any settings."""

    folder: Path
    home: Path
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def file(self) -> Path:
        return self.folder / "greet.py"

    def run(self, *command: str, typed: str = "", **variables: str) -> Ended:
        """`typed`: what the program reads from its input."""
        source: dict[str, Any] = {"input": typed} if typed else {"stdin": subprocess.DEVNULL}
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self._environment() | self.variables | variables,
            capture_output=True,
            text=True,
            timeout=RUN_S,
            **source,
        )
        return Ended(done.returncode, done.stdout, done.stderr)

    def launch(
        self, tool: str, server: AgentServer, *arguments: str, typed: str = "", **variables: str
    ) -> Ended:
        """`outrider launch`, as a user calls it."""
        if shutil.which(TOOLS[tool].program, path=tool_path()) is None:
            skip_as_missing(tool)
        command = [sys.executable, "-m", "outrider", "launch", tool, "--url", server.url]
        return self.run(*command, "--", *arguments, typed=typed, **variables)

    def _environment(self) -> dict[str, str]:
        kept = ("LANG", "PYTHONPATH", "TMPDIR", "SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS")
        inherited = {name: os.environ[name] for name in kept if name in os.environ}
        return inherited | {"HOME": str(self.home), "PATH": tool_path(), "NO_COLOR": "1", "CI": "1"}


def tool_path() -> str:
    folders = [f"{INSTALLED}/npm/node_modules/.bin", f"{INSTALLED}/aider/bin", f"{INSTALLED}/python/bin"]
    return ":".join([*(folders if INSTALLED else ()), os.environ["PATH"]])


def skip_as_missing(tool: str) -> None:
    files = sorted(Path(INSTALLED or "").glob("*.reason"))
    reasons = "; ".join(f"{file.stem}: {file.read_text().strip()}" for file in files)
    pytest.skip(f"{tool} is not installed ({reasons or 'see .ci/agents'})")


def new_workplace(parent: Path) -> Workplace:
    folder, home = parent / "greeter", parent / "home"
    folder.mkdir()
    home.mkdir()
    (folder / "greet.py").write_text('print("helo")\n')
    subprocess.run(["git", "init", "--quiet", str(folder)], check=True)
    return Workplace(folder, home)


def refused(records: Sequence[Mapping[str, Any]]) -> list[tuple[str, int]]:
    """The requests that were not answered."""
    return [(record["path"], record["status"]) for record in records if record["status"] != 200]
