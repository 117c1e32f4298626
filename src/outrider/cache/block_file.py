"""One cached block as a safetensors file that can vouch for itself. No MLX, no threads.

    8 bytes        length of the header
    header         JSON: each array's name, type, shape and place; "__metadata__": who wrote it, a checksum
    data           the arrays, one after the other

The checksum covers the data and everything else in the header.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from outrider.host_array import HostArray

FORMAT = "outrider prefix block"
VERSION = 1
MOST_HEADER_BYTES = 1 << 20
TEMPORARY = ".outrider-writing-"

_DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}


class BadFile(ValueError):
    """The file, or what should be written to one, is not what it must be; the message says why."""


Arrays = Mapping[str, HostArray]


def check_finite(arrays: Arrays) -> None:
    """Raise BadFile if there is a NaN or an infinity anywhere: such a block must not outlive the process."""
    for array in arrays.values():
        if array.dtype == "BF16":
            is_finite = bool(((array.data & 0x7F80) != 0x7F80).all())
        else:
            is_finite = bool(np.isfinite(array.data).all())
        if not is_finite:
            raise BadFile("it holds NaN or infinity")


def write_block_file(path: Path, labels: Mapping[str, str], arrays: Arrays) -> int:
    """Write it whole or not at all; its size in bytes. Whoever reads never sees a part."""
    body = [np.ascontiguousarray(array.data).reshape(-1).view(np.uint8).data for array in arrays.values()]
    metadata = {"format": FORMAT, "version": str(VERSION), **labels}
    header: dict[str, object] = {**_header(arrays), "__metadata__": metadata}
    metadata["checksum"] = _checksum(header, body)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    temporary = path.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")
    try:
        with open(temporary, "xb") as file:
            fcntl.flock(
                file, fcntl.LOCK_EX
            )  # says that somebody is still writing it: see remove_if_abandoned
            file.write(len(text).to_bytes(8, "little") + text)
            for part in body:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    return 8 + len(text) + sum(part.nbytes for part in body)


def remove_if_abandoned(temporary: Path) -> bool:
    """Remove a file that was being written by a process that is no more."""
    try:
        with open(temporary, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            temporary.unlink()
            return True
    except OSError:  # somebody's at work, or it is gone, or it is not ours to remove
        return False


def read_block_file(path: Path, labels: Mapping[str, str]) -> dict[str, HostArray]:
    """The arrays of a file that was written with these labels. BadFile if anything about it is not right."""
    raw = path.read_bytes()
    try:
        return _parsed(raw, labels)
    except BadFile:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadFile(f"its header cannot be read ({type(error).__name__})") from error


def _parsed(raw: bytes, labels: Mapping[str, str]) -> dict[str, HostArray]:
    length = int.from_bytes(raw[:8], "little")
    if len(raw) < 8 or length > min(MOST_HEADER_BYTES, len(raw) - 8):
        raise BadFile("it is cut off or no safetensors file")
    header = json.loads(raw[8 : 8 + length])
    metadata = header["__metadata__"]
    if metadata.get("format") != FORMAT:
        raise BadFile("it was not written by this program")
    if metadata.get("version") != str(VERSION):
        raise BadFile(f"it has format version {metadata.get('version')}, this is {VERSION}")
    for label, value in labels.items():
        if metadata.get(label) != value:
            raise BadFile(f"it belongs to another {label}")
    body = memoryview(raw)[8 + length :]
    checksum = metadata.pop("checksum")
    if _checksum(header, [body]) != checksum:
        raise BadFile("its checksum is wrong")
    del header["__metadata__"]
    return {name: _array(entry, body) for name, entry in header.items()}


def _array(entry: Mapping[str, Any], body: memoryview) -> HostArray:
    start, end = entry["data_offsets"]
    data = np.frombuffer(body[start:end], _DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return HostArray(entry["dtype"], data)


def _header(arrays: Arrays) -> dict[str, object]:
    header: dict[str, object] = {}
    place = 0
    for name, array in arrays.items():
        if array.data.dtype != _DTYPES[array.dtype]:
            raise BadFile(f"array {name} is {array.data.dtype} and said to be {array.dtype}")
        end = place + math.prod(array.data.shape) * array.data.dtype.itemsize
        header[name] = {
            "dtype": array.dtype,
            "shape": list(array.data.shape),
            "data_offsets": [place, end],
        }
        place = end
    return header


def _checksum(header: Mapping[str, object], body: Sequence[memoryview]) -> str:
    """Of a header that has no checksum yet, and of the data."""
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for part in body:
        digest.update(part)
    return digest.hexdigest()
