"""`outrider keys`: adds API keys to the file that `outrider serve --api-keys-file` reads."""

from __future__ import annotations

import argparse
import fcntl
import os
import sys
from pathlib import Path

from outrider.config import InvalidConfig

Commands = argparse._SubParsersAction  # of argparse.ArgumentParser
VARIABLE = "OUTRIDER_API_KEYS_FILE"


def add_keys(commands: Commands[argparse.ArgumentParser]) -> None:
    keys = commands.add_parser(
        "keys",
        help="make API keys for the server",
        description="Makes API keys for `outrider serve --api-keys-file FILE`. To revoke a key, delete its "
        "table in the file: the server notices within a second.",
    )
    verbs = keys.add_subparsers(required=True, metavar="VERB")
    new = verbs.add_parser(
        "new",
        help="make a key",
        description="Makes a random key, prints it once, and adds its hash to the file.",
    )
    new.add_argument("name", metavar="NAME", help="who uses the key: letters, digits, - and _")
    new.add_argument(
        "--file",
        metavar="FILE",
        default=os.environ.get(VARIABLE),
        help=f"file with the hashes of all keys; made if missing ({VARIABLE})",
    )
    new.add_argument("--operator", action="store_true", help="may also read metrics and delete caches")
    for flag, what in (
        ("--requests-per-minute", "requests a minute"),
        ("--tokens-per-minute", "tokens of prompts and answers a minute"),
        ("--max-rows", "answers that run or wait at once"),
        ("--max-live-bytes", "bytes of request bodies held at once"),
        ("--max-live-tokens", "tokens of prompts that run or wait at once"),
    ):
        new.add_argument(flag, type=int, metavar="N", help=f"limit of {what} (none)")
    new.set_defaults(run=run_new)


def run_new(args: argparse.Namespace) -> int:
    from outrider.api.keys import KeyLimits, new_key

    if not args.file:
        raise InvalidConfig(f"name the file for the key: --file FILE, or {VARIABLE}")
    limits = KeyLimits(
        args.requests_per_minute,
        args.tokens_per_minute,
        args.max_rows,
        args.max_live_bytes,
        args.max_live_tokens,
    )
    file = Path(args.file).expanduser()
    try:
        key, table = new_key(args.name, args.operator, limits)
        _append(file, args.name, table)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidConfig(f"no key was added to {file}: {reason}") from None
    print(key)
    print(f"This is the only time that the key is shown. {file} has its hash.", file=sys.stderr)
    return 0


def _append(file: Path, name: str, table: str) -> None:
    """Add a table in one write, if the file is valid with it. Raises OSError or ValueError."""
    from outrider.api.keys import parse_keys
    from outrider.files.private import refuse_if_others_may_write

    handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    with open(handle, "r+b", buffering=0) as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)  # another `outrider keys new` waits
        refuse_if_others_may_write(file, os.fstat(handle))
        before = opened.read().decode()
        if any(key.name == name for key in parse_keys(before).values()):
            raise ValueError(f"it has a key {name} already: delete the table [{name}] to replace the key")
        gap = "" if not before else "\n" if before.endswith("\n") else "\n\n"
        parse_keys(before + gap + table)
        opened.write((gap + table).encode())
        os.fsync(handle)
