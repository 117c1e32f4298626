"""Which models `outrider serve` serves, under which names and with which options.

They come from the command line, from the [models.NAME] tables of the TOML file, and from --models-dir.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outrider.config import InvalidConfig
from outrider.pool.model_entry import FOREVER

log = logging.getLogger(__name__)

MAX_NAME = 200  # characters; chosen by hand
CACHED = "cached"  # the value of --models-dir that means the caches of `outrider list`


@dataclass(frozen=True)
class ModelSpec:
    name: str
    model: str | Path | None  # folder, GGUF file or id; None: the default model
    options: dict[str, Any]  # of this model: the server's, and those of its table over them
    aliases: tuple[str, ...] = ()
    hidden_names: tuple[str, ...] = ()  # accepted in requests, not listed
    is_pinned: bool = False
    idle_unload_s: float = FOREVER


def model_specs(options: dict[str, Any]) -> list[ModelSpec]:
    """The first one is the default of requests without a name. Raises InvalidConfig."""
    tables = options["model_tables"]
    given: list[str] = list(options["models"])
    specs = [_of_table(name, options) if name in tables else _of_path(name, options) for name in given]
    if not given:
        specs += [_of_table(name, options) for name in tables]
    if options["models_dir"] is not None:
        folder = options["models_dir"]
        found = cached_models() if folder == CACHED else models_in(Path(folder).expanduser())
        known = {spec.name for spec in specs}
        specs += [_of_path(path, options, name) for name, path in found.items() if name not in known]
    if not specs:
        specs = [_of_path(None, options)]
    if len(specs) > 1:
        _check_options_of_several(options)
    specs = _pinned(specs, options["pin"])
    _check_names(specs)
    return specs


def option_sets(options: dict[str, Any]) -> list[dict[str, Any]]:
    """The options of each model, to check their values before anything is loaded or imported."""
    return [options, *(options | table for table in options["model_tables"].values())]


def model_name(model: str | Path) -> str:
    """The default served name: a Hugging Face id itself, the last part of a path, or an own model's name."""
    from outrider.models.files.named import named_model

    path = Path(model).expanduser()
    if not path.exists():
        own = named_model(model)
        return str(model) if own is None else own.NAME
    return path.stem if path.is_file() else path.resolve().name


def models_in(folder: Path) -> dict[str, Path]:
    """By name: the model folders and GGUF files in a folder, and in its folders. Raises InvalidConfig."""
    try:
        found = dict(_models_in(folder, ""))
    except OSError as error:
        raise InvalidConfig(f"--models-dir {folder} cannot be read: {error.strerror}") from None
    if not found:
        raise InvalidConfig(
            f"--models-dir {folder} has no models: folders with config.json and *.safetensors, or .gguf files"
        )
    return found


def cached_models() -> dict[str, Path]:
    """By name: the complete models in Outrider's and the Hugging Face cache. Raises InvalidConfig."""
    from outrider.models.files import cached

    found: dict[str, Path] = {}
    for model in cached.cached_models():
        if model.is_intact and (model.path / "config.json").is_file() and _has_weights(model.path):
            found.setdefault(model.name, model.path)
    if not found:
        raise InvalidConfig(
            f"--models-dir {CACHED}: there are no models in the caches. Download one: outrider pull NAME"
        )
    return found


def _models_in(folder: Path, owner: str) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.suffix == ".gguf" and path.is_file():
            yield owner + path.stem, path
        elif (path / "config.json").is_file():
            if _has_weights(path):
                yield owner + path.name, path
            else:
                log.warning("%s is not served: it has a config.json and no *.safetensors", path)
        elif path.is_dir() and not owner:
            yield from _models_in(path, f"{path.name}/")


def _has_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors"))


def _of_path(model: str | Path | None, options: dict[str, Any], name: str | None = None) -> ModelSpec:
    from outrider.models.files.default_model import NAME
    from outrider.models.files.named import named_model

    name = name or (NAME if model is None else model_name(model))
    own = named_model(name)
    hidden = (*(own.OLD_NAMES if own is not None else ()), *(() if model is None else (str(model),)))
    names = tuple(options["served_model_name"])
    return _spec(names[0] if names else name, model, options, names[1:], hidden)


def _of_table(name: str, options: dict[str, Any]) -> ModelSpec:
    table = dict(options["model_tables"][name])
    path, aliases = table.pop("path"), table.pop("aliases", ())
    return _spec(name, path, options | table, aliases, (), is_pinned=table.get("pin", False))


def _spec(
    name: str,
    model: str | Path | None,
    options: dict[str, Any],
    aliases: tuple[str, ...],
    hidden_names: tuple[str, ...],
    is_pinned: bool = False,
) -> ModelSpec:
    idle_s = options["idle_unload"] or FOREVER  # 0: never
    return ModelSpec(name, model, options, aliases, hidden_names, is_pinned, idle_s)


def _pinned(specs: list[ModelSpec], pins: tuple[str, ...]) -> list[ModelSpec]:
    for pin in pins:
        if not any(pin in (spec.name, *spec.aliases) for spec in specs):
            known = ", ".join(spec.name for spec in specs)
            raise InvalidConfig(f"--pin {pin}: no model has this name. Models: {known}")
    return [replace(spec, is_pinned=True) if {spec.name, *spec.aliases} & {*pins} else spec for spec in specs]


def _check_options_of_several(options: dict[str, Any]) -> None:
    for key, instead in (
        ("served_model_name", "aliases in a [models.NAME] table"),
        ("head", "head in a [models.NAME] table"),
        ("draft_model", "draft_model in a [models.NAME] table"),
        ("revision", "revision in a [models.NAME] table"),
        ("adapter", "adapter in a [models.NAME] table"),
        ("adapters", "adapters in a [models.NAME] table"),
    ):
        if options[key]:
            flag = f"--{key.replace('_', '-')}"
            raise InvalidConfig(f"{flag} belongs to one model, and several are served: use {instead}")


def _check_names(specs: list[ModelSpec]) -> None:
    owners: dict[str, ModelSpec] = {}
    for spec in specs:
        for name in (spec.name, *spec.aliases):
            if not name or len(name) > MAX_NAME or not name.isprintable():
                raise InvalidConfig(
                    f"{name[:MAX_NAME]!r} cannot be the name of a model: use up to {MAX_NAME} printable "
                    "characters"
                )
            other = owners.setdefault(name, spec)
            if other is not spec:
                raise InvalidConfig(
                    f"two models have the name {name}: {other.model} and {spec.model}. Give one of them a "
                    f"name of its own in the TOML file: [models.NAME] path"
                )
