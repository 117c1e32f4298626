"""A model's `generation_config.json`: the sampling values that its publisher recommends.

Owns which values are read, and the messages about bad ones. mlx-lm reads the stop tokens of the same file.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from outrider.files.atomic import write_text
from outrider.models.errors import ModelUnavailable
from outrider.request import InvalidRequest, SamplingDefaults

FILE_NAME = "generation_config.json"
NAMES = tuple(field.name for field in fields(SamplingDefaults))


class InvalidGenerationConfig(ModelUnavailable):
    """The file cannot be used. The message names the file, the value and what to do."""


def sampling_defaults(folder: Path) -> SamplingDefaults:
    """The recommended values; none of them if there is no file. Raises InvalidGenerationConfig."""
    config = read(folder)
    values = {name: config[name] for name in NAMES if config.get(name) is not None}
    do_sample = config.get("do_sample")
    if values.get("top_k") == -1:  # another way to write "off"
        values["top_k"] = 0
    try:
        if do_sample is not None and not isinstance(do_sample, bool):
            raise InvalidRequest(f"do_sample must be true or false, not {do_sample!r}")
        if do_sample is False:
            values["temperature"] = 0.0
        return SamplingDefaults(**values)
    except InvalidRequest as error:
        raise InvalidGenerationConfig(
            f"{folder / FILE_NAME}: {error}. Correct the file, or leave its sampling values out: "
            '--generation-config none, in Python generation_config="none".'
        ) from None


def read(folder: Path) -> dict[str, Any]:
    """The whole file as an object, empty if there is no file. Raises InvalidGenerationConfig."""
    file = folder / FILE_NAME
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidGenerationConfig(
            f"{file} cannot be read: {error}. Correct or remove the file."
        ) from None
    if not isinstance(config, dict):
        raise InvalidGenerationConfig(f"{file} is not a JSON object. Correct or remove the file.")
    return config


def write(folder: Path, config: dict[str, Any]) -> None:
    write_text(folder / FILE_NAME, json.dumps(config, indent=2) + "\n")
