"""Files and folders that no other user may change, and a secret key in a file.

Root counts as the same user: root can change everything anyway.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

KEY_BYTES = 32  # as long as the digest of SHA-256; a longer key adds nothing


def refuse_if_others_may_write(path: Path, found: os.stat_result) -> None:
    """Raise PermissionError if another user owns the file or folder or may write to it."""
    if found.st_uid not in (os.geteuid(), 0):
        raise PermissionError(errno.EACCES, f"it belongs to another user (uid {found.st_uid})", str(path))
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(found.st_mode)
        reason = f"other users may write to it (its mode is {mode:o}): run chmod go-w {path}"
        raise PermissionError(errno.EACCES, reason, str(path))


def may_others_read(found: os.stat_result) -> bool:
    return bool(found.st_mode & (stat.S_IRGRP | stat.S_IROTH))


def secret_key(path: Path, may_create: bool) -> bytes:
    """The key in the file. A missing file is made, with a random key that only its owner can read.

    Several processes may call this at once: all get the same key. Raises OSError.
    """
    flags = os.O_RDWR | os.O_CREAT if may_create else os.O_RDONLY
    handle = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(handle, "r+b" if may_create else "rb") as file:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        found = os.fstat(handle)
        refuse_if_others_may_write(path, found)
        if may_others_read(found):
            reason = f"other users may read the secret key {path}: remove this file"
            raise PermissionError(errno.EACCES, reason, str(path))
        key = file.read(KEY_BYTES + 1)
        if not key and may_create:
            key = secrets.token_bytes(KEY_BYTES)
            file.write(key)
            file.flush()
            os.fsync(handle)
    if len(key) != KEY_BYTES:
        raise OSError(errno.EINVAL, f"the secret key {path} is damaged: remove this file", str(path))
    return key
