"""Bodies by the server's own description: python fuzzer.py OPENAPI_FILE FILE NUM SEED

Schemathesis makes them from /openapi.json, half as it allows and half as it forbids. Each line of FILE is a
path and a body. A process of its own, because making bodies takes longer than answering them.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any, TextIO

import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import Case, GenerationMode

EXAMPLES_AT_ONCE = 20
SETTINGS = settings(
    max_examples=EXAMPLES_AT_ONCE,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def write_bodies(operation: Any, mode: GenerationMode, seed_: int, file: TextIO) -> None:
    def write(case: Case) -> None:
        if isinstance(case.body, dict | list | str | int | float | None):
            file.write(json.dumps([case.formatted_path, case.body]) + "\n")

    with contextlib.suppress(Unsatisfiable):  # an operation without a body has no false one
        seed(seed_)(SETTINGS(given(operation.as_strategy(generation_mode=mode))(write)))()
    file.flush()


def main() -> None:
    description, path, num, seed_ = sys.argv[1:]
    schema = schemathesis.openapi.from_dict(json.loads(Path(description).read_text()))
    operations = [found.ok() for found in schema.get_all_operations()]
    posts = [operation for operation in operations if operation.method.upper() == "POST"]
    with open(path, "w") as file:
        for turn in range(int(num) // (2 * EXAMPLES_AT_ONCE * len(posts)) + 1):
            for operation in posts:
                for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                    write_bodies(operation, mode, int(seed_) + turn, file)


if __name__ == "__main__":
    main()
