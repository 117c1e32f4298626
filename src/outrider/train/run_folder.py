"""The folder of an unfinished run, beside the head file that the run will write.

    weights.safetensors         the result; appears at the end
    weights.training/
      run.json                  the model, the settings and the prompts of the run
      conversations.jsonl       the synthesised conversations so far
      checkpoint.safetensors    the last checkpoint
      lock                      held by the process that trains

Must not know how conversations and checkpoints are made.
"""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outrider.train.errors import TrainingError
from outrider.train.output_files import write_text
from outrider.train.prompts import Message
from outrider.train.settings import TrainingSettings

RECORD_NAME = "run.json"
LOCK_NAME = "lock"


@dataclass(frozen=True)
class RunRecord:
    trunk: dict[str, str]  # the model's fingerprint
    settings: TrainingSettings
    prompts: list[list[Message]]  # empty: the model makes up its own


class RunFolder:
    def __init__(self, out: Path) -> None:
        self.out = out
        self.folder = out.with_suffix(".training")

    @property
    def conversations(self) -> Path:
        return self.folder / "conversations.jsonl"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """TrainingError if another process trains here. The kernel frees the lock when a process ends."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = open(self.folder / LOCK_NAME, "a")  # noqa: SIM115
        except OSError as error:
            raise TrainingError(f"{self.folder} cannot be written: {error.strerror}.") from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise TrainingError(f"Another process is training in {self.folder}.") from None
            yield

    @property
    def is_begun(self) -> bool:
        return (self.folder / RECORD_NAME).exists()

    def begin(self, record: RunRecord) -> None:
        """Remove the files of an older run and write the record of this one."""
        self.clear()
        write_text(self.folder / RECORD_NAME, json.dumps(asdict(record), indent=1) + "\n")

    def record(self) -> RunRecord:
        path = self.folder / RECORD_NAME
        try:
            record = json.loads(path.read_text())
            return RunRecord(record["trunk"], TrainingSettings(**record["settings"]), record["prompts"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TrainingError(f"{path} is damaged ({error!r}). Start afresh with --force.") from error

    def clear(self) -> None:
        """Remove all files but the lock, which this process holds."""
        for path in self.folder.glob("*"):
            if path.name != LOCK_NAME:
                path.unlink()

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def check_same(record: RunRecord, trunk: Mapping[str, str], given: Mapping[str, Any], prompts: Any) -> None:
    """TrainingError: the user resumes with another model, other settings or other prompts."""
    if record.trunk["trunk_config_sha256"] != trunk["trunk_config_sha256"]:
        raise TrainingError(f"The run was begun for another model, {record.trunk['trunk']}.")
    for name, value in given.items():
        begun_with = getattr(record.settings, name)
        if value != begun_with:
            option = f"--{name.replace('_', '-')}"
            raise TrainingError(
                f"The run was begun with {option} {begun_with}, not {value}: leave the option out, "
                "or start afresh with --force."
            )
    if prompts and prompts != record.prompts:
        raise TrainingError("The run was begun with other prompts: leave --prompts out, or use --force.")
