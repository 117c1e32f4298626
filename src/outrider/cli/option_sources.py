"""The values of the options of `outrider serve`: from flags, then OUTRIDER_*, then a TOML file.

The file may also have a table for each model, [models.NAME], with the model's path and its own options.
"""

from __future__ import annotations

import argparse
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.cli.foreign_flags import translated_flags
from outrider.cli.option_values import duration
from outrider.cli.serve_options import OPTIONS, PREFIX, Option
from outrider.config import InvalidConfig

TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
MODEL_TABLES = "models"  # in the file
OF_ONE_MODEL_KEYS = (
    *("mtp", "draft_depth", "drafter", "head", "draft_model", "draft_vocabulary"),
    *("generation_config", "max_tokens"),
    *(key for key in OPTIONS if key.startswith("default_")),
    *("reasoning_parser", "max_thinking_tokens", "reasoning_budget_message"),
    *("tool_call_parser", "no_tool_grammar", "max_rows", "max_context", "memory_budget"),
    *("prefill_step_size", "max_stall_ms", "revision", "dtype", "prefix_cache_bytes", "no_prefix_cache"),
    *("kv_bits", "adapter", "adapters", "max_adapters", "adapter_memory"),
    *("spec_prefill_model", "spec_prefill_layers"),
)
# Options of a [models.NAME] table. The other ones are of the whole server.
OF_A_MODEL = {key: OPTIONS[key] for key in OF_ONE_MODEL_KEYS} | {
    "path": Option("path", "model folder, GGUF file or Hugging Face id"),
    "aliases": Option("aliases", "further names of the model", is_list=True),
    "pin": Option("pin", "load at the start, never unload", is_switch=True),
    "idle_unload": Option("idle-unload", "as --idle-unload", duration),
}


def resolve(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The value of every option, by key. Raises InvalidConfig, which names the source of a bad value."""
    flags = _flags(args)
    file = args.config or environ.get(f"{PREFIX}CONFIG") or None
    from_file = _read_file(Path(file)) if file else {}
    found: dict[str, Any] = {"model_tables": _model_tables(file, from_file.pop(MODEL_TABLES, {}))}
    for key, option in OPTIONS.items():
        given = environ.get(option.variable, "")
        if key in flags:
            source, value = flags[key]
        elif given:
            source, value = option.variable, given
        elif key in from_file:
            source, value = f"{file}: {key}", from_file[key]
        else:
            found[key] = () if option.is_list else False if option.is_switch else option.default
            continue
        try:
            found[key] = _value(option, value)
        except ValueError as error:
            raise InvalidConfig(f"{source}: {error}") from None
    if args.given_models:
        found["model"] = args.given_models[0]
    found["models"] = tuple(args.given_models) or ((found["model"],) if found["model"] else ())
    return found


def _model_tables(file: str | None, tables: Any) -> dict[str, dict[str, Any]]:
    """By model name: the values of its table. Raises InvalidConfig."""
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise InvalidConfig(f"{file}: models has to consist of tables: [models.NAME]")
    return {name: _model_table(f"{file}: [models.{name}]", table) for name, table in tables.items()}


def _model_table(where: str, table: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in table.items():
        key = name.replace("-", "_")
        if key not in OF_A_MODEL:
            known = ", ".join(key.replace("_", "-") for key in sorted(OF_A_MODEL))
            raise InvalidConfig(f"{where} {name} is not an option of a model. Options: {known}")
        try:
            found[key] = _value(OF_A_MODEL[key], value)
        except ValueError as error:
            raise InvalidConfig(f"{where} {name}: {error}") from None
    if "path" not in found:
        raise InvalidConfig(f"{where} has no path: give the model's folder, GGUF file or Hugging Face id")
    return found


def _flags(args: argparse.Namespace) -> dict[str, tuple[str, Any]]:
    """(flag, value) by key. Raises InvalidConfig if a flag and another server's flag for it differ."""
    found: dict[str, tuple[str, Any]] = {}
    if not args.given_models:
        _check_words(args)
    for key, option in OPTIONS.items():
        if hasattr(args, f"given_{key}"):
            found[key] = (option.flag, getattr(args, f"given_{key}"))
    for flag, key, value in translated_flags(args):
        other_flag, other_value = found.setdefault(key, (flag, value))
        if other_value != value:
            raise InvalidConfig(f"{flag} and {other_flag} {other_value} contradict each other: give only one")
    return found


def _check_words(args: argparse.Namespace) -> None:
    """A flag that takes several words would take a MODEL after them for one more word."""
    for option in OPTIONS.values():
        words = getattr(args, f"given_{option.key}", []) if option.takes_words else []
        others = [word for word in words[1:] if "=" not in word]  # --adapters NAME=DIR
        models = [word for word in others if "/" in word or word.endswith(".gguf") or Path(word).exists()]
        if models:
            raise InvalidConfig(
                f"{option.flag} {' '.join(words)}: {models[0]} looks like the model. Give the MODEL before "
                "this flag, or separate names by commas."
            )


def _read_file(file: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(file.read_text())
    except OSError as error:
        raise InvalidConfig(f"{file} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"{file} is not TOML: {error}") from None
    found = {name.replace("-", "_"): value for name, value in table.items()}
    unknown = sorted(set(found) - {*OPTIONS, MODEL_TABLES})
    if unknown:
        known = ", ".join(sorted(OPTIONS))
        raise InvalidConfig(f"{file}: {unknown[0]!r} is not an option. Options: {known}")
    return found


def _value(option: Option, given: Any) -> Any:
    """Parse a value: the text of a flag or variable, or a value of a TOML type."""
    if option.is_switch:
        return _switch(given)
    if option.is_list:
        texts = given if isinstance(given, list) else [given]
        return tuple(part.strip() for text in texts for part in str(text).split(",") if part.strip())
    if isinstance(given, (bool, list, dict)):
        raise ValueError(f"{given!r} is not a value for {option.flag}")
    return option.parse(str(given))


def _switch(given: Any) -> bool:
    if isinstance(given, bool):
        return given
    if str(given).lower() in (*TRUE, *FALSE):
        return str(given).lower() in TRUE
    raise ValueError(f"{given!r} is neither true nor false")
