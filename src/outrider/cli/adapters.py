"""The options of `outrider serve` about adapters: their checks, and what the engine and the API take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outrider.config import DEFAULT_MAX_ADAPTERS, InvalidConfig


def named_adapters(options: dict[str, Any]) -> dict[str, str]:
    """The folders of --adapters, by name. Raises InvalidConfig."""
    found: dict[str, str] = {}
    for text in options["adapters"]:
        name, equals, folder = text.partition("=")
        if not (name and equals and folder):
            raise InvalidConfig(f"--adapters: {text!r} is not of the form NAME=DIR")
        if name in found:
            raise InvalidConfig(f"--adapters: the name {name!r} is given twice")
        found[name] = folder
    if options["adapter"] is not None and (found or options["adapters_dir"] is not None):
        raise InvalidConfig(
            "--adapter is for all requests, --adapters and --adapters-dir are for requests that name one: "
            "give one or the others"
        )
    return found


def max_adapters(options: dict[str, Any]) -> int:
    """How many adapters may be loaded at once; 0 if no option asks for adapters."""
    is_asked = bool(options["adapters"]) or options["adapters_dir"] is not None
    if options["max_adapters"] is None:
        return DEFAULT_MAX_ADAPTERS if is_asked else 0
    if not is_asked:
        raise InvalidConfig("--max-adapters needs --adapters or --adapters-dir")
    if options["max_adapters"] < 1:
        raise InvalidConfig(f"--max-adapters must be at least 1, not {options['max_adapters']}")
    return int(options["max_adapters"])


def adapters_folder(options: dict[str, Any]) -> Path | None:
    """The folder of --adapters-dir, without links. Raises InvalidConfig if there is none."""
    if options["adapters_dir"] is None:
        return None
    folder = Path(options["adapters_dir"]).expanduser()
    if not folder.is_dir():
        raise InvalidConfig(f"--adapters-dir {folder}: there is no such folder")
    return folder.resolve()
