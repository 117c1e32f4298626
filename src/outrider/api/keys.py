"""The API keys: given by flags, or in a file that is read again when it changes.

The file is TOML, with a table for each key. `outrider keys new` adds one:

    [alice]
    sha256 = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b"
    role = "user"                     # or "operator": may also read metrics and delete caches
    requests-per-minute = 60          # limits are optional
    tokens-per-minute = 100000
    max-rows = 4
    max-live-bytes = 33554432
    max-live-tokens = 20000

A key has 256 random bits. Nobody can find it by trying, so its hash needs no salt and need not be slow.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import secrets
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.api.load import LoadLimit
from outrider.api.settings import ServerSettings
from outrider.config import InvalidConfig
from outrider.files.private import may_others_read, refuse_if_others_may_write

log = logging.getLogger(__name__)

CHECK_EVERY_S = 1.0  # seconds between two looks at the file; chosen by hand: a revoked key works no longer
MAX_FILE_BYTES = 1 << 20  # about 8,000 keys; chosen by hand
KEY_BYTES = 32  # of randomness in a new key
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
SHA256 = re.compile(r"[0-9a-f]{64}")
ROLES = ("user", "operator")
LIMITS = ("requests-per-minute", "tokens-per-minute", "max-rows", "max-live-bytes", "max-live-tokens")
FLAG_NAMES = ("api-key", "operator-key")  # names of the keys that --api-key and --operator-key give


@dataclass(frozen=True)
class KeyLimits:
    """None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # of prompts and answers
    max_rows: int | None = None  # answers that run or wait at once
    max_live_bytes: int | None = None  # of the bodies of these requests
    max_live_tokens: int | None = None  # of their prompts

    @property
    def held(self) -> LoadLimit:
        return LoadLimit(self.max_rows, self.max_live_bytes, self.max_live_tokens)


@dataclass(frozen=True)
class ApiKey:
    """What the server knows about a key. `name` identifies its holder: a new key may take over the name."""

    name: str
    is_operator: bool = False
    limits: KeyLimits = KeyLimits()


KeysByHash = Mapping[str, ApiKey]


def key_hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def parse_keys(text: str) -> dict[str, ApiKey]:
    """The keys of a file, by hash. Raises ValueError."""
    found: dict[str, ApiKey] = {}
    for name, table in tomllib.loads(text).items():
        _check_name(name)
        if not isinstance(table, dict):
            raise ValueError(f"{name!r} is not a table: a key begins with a line [NAME]")
        unknown = sorted(set(table) - {"sha256", "role", *LIMITS})
        if unknown:
            raise ValueError(f"[{name}]: unknown field {unknown[0]!r}")
        digest, role = table.get("sha256"), table.get("role", "user")
        if not isinstance(digest, str) or not SHA256.fullmatch(digest):
            raise ValueError(f"[{name}]: sha256 must be 64 hexadecimal digits in lower case")
        if role not in ROLES:
            raise ValueError(f"[{name}]: role must be {' or '.join(ROLES)}, not {role!r}")
        if digest in found:
            raise ValueError(f"[{name}] has the same key as [{found[digest].name}]")
        limits = {field.replace("-", "_"): _limit(name, field, table) for field in LIMITS}
        found[digest] = ApiKey(name, role == "operator", KeyLimits(**limits))
    return found


def _check_name(name: str) -> None:
    if not NAME.fullmatch(name) or name in FLAG_NAMES:
        raise ValueError(
            f"[{name}]: a name has up to 64 letters, digits, - and _, and is not {' or '.join(FLAG_NAMES)}"
        )


def _limit(name: str, field: str, table: Mapping[str, Any]) -> int | None:
    value = table.get(field)
    if value is not None and (type(value) is not int or value < 1):
        raise ValueError(f"[{name}]: {field} must be a whole number of at least 1, not {value!r}")
    return value


def new_key(name: str, is_operator: bool = False, limits: KeyLimits | None = None) -> tuple[str, str]:
    """A new random key, and its table for the file. Raises ValueError."""
    _check_name(name)
    key = f"sk-{secrets.token_urlsafe(KEY_BYTES)}"
    lines = [f"[{name}]", f'sha256 = "{key_hash(key)}"', f'role = "{ROLES[is_operator]}"']
    for field in LIMITS:
        value = getattr(limits, field.replace("-", "_"), None)
        lines += [] if value is None else [f"{field} = {value}"]
    return key, "\n".join(lines) + "\n"


class KeysFile:
    """The keys of a file. A change is noticed within a second; a broken file leaves the old keys valid."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises InvalidConfig."""
        self._path = path
        self._clock = clock
        self._next_look_s = clock() + CHECK_EVERY_S
        self._is_reading = False
        self.keys, self._version = self._read()

    async def refresh(self) -> None:
        """Read the file again if it has changed, and at most once a second."""
        if self._is_reading or self._clock() < self._next_look_s:
            return
        self._next_look_s = self._clock() + CHECK_EVERY_S
        version = _version(self._path)
        if version == self._version:
            return
        self._is_reading = True
        try:
            self.keys, self._version = await asyncio.to_thread(self._read)
            log.info("%s has changed: %d API keys", self._path, len(self.keys))
        except InvalidConfig as error:
            self._version = version  # the error is logged once
            log.error("%s. The keys from before remain valid", error)
        finally:
            self._is_reading = False

    def _read(self) -> tuple[KeysByHash, tuple[int, ...] | None]:
        try:
            with open(self._path, "rb") as file:
                found = os.fstat(file.fileno())
                refuse_if_others_may_write(self._path, found)
                data = file.read(MAX_FILE_BYTES + 1)
            if len(data) > MAX_FILE_BYTES:
                raise ValueError(f"it is larger than {MAX_FILE_BYTES:,} bytes")
            keys = parse_keys(data.decode())
        except OSError as error:
            raise InvalidConfig(f"the API keys in {self._path} are not used: {error.strerror}") from None
        except ValueError as error:
            raise InvalidConfig(f"the API keys in {self._path} cannot be read: {error}") from None
        if not keys:
            raise InvalidConfig(f"{self._path} has no API keys: `outrider keys new NAME` adds one")
        if may_others_read(found):
            log.warning("other users may read %s, names and limits included: run chmod 600", self._path)
        return keys, _version_of(found)


def _version(path: Path) -> tuple[int, ...] | None:
    try:
        return _version_of(path.stat())
    except OSError:
        return None


def _version_of(found: os.stat_result) -> tuple[int, ...]:
    return found.st_ino, found.st_mtime_ns, found.st_size, found.st_mode


class ApiKeys:
    """All keys that the server accepts. Looked up by hash: the time of a lookup tells nothing about a key."""

    def __init__(self, given: KeysByHash, file: KeysFile | None = None) -> None:
        self._given = given
        self._file = file

    async def find(self, sent: str) -> ApiKey | None:
        if not sent:
            return None
        digest = key_hash(sent)
        if self._file is not None:
            await self._file.refresh()
            if (found := self._file.keys.get(digest)) is not None:
                return found
        return self._given.get(digest)


def api_keys(settings: ServerSettings) -> ApiKeys | None:
    """None if the server needs no key. Raises InvalidConfig."""
    if not settings.needs_key:
        return None
    given: dict[str, ApiKey] = {}
    if settings.api_key is not None:
        given[key_hash(settings.api_key)] = ApiKey("api-key", is_operator=settings.operator_key is None)
    if settings.operator_key is not None:
        given[key_hash(settings.operator_key)] = ApiKey("operator-key", is_operator=True)
    file = settings.api_keys_file
    return ApiKeys(given, None if file is None else KeysFile(Path(file).expanduser()))
