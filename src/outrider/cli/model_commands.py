"""`outrider pull`, `list`, `show` and `rm`: the models on this machine."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from outrider.cli.models import add_list_options, add_pull_options, add_rm_options, size_text
from outrider.models.errors import ModelUnavailable

Commands = argparse._SubParsersAction  # of argparse.ArgumentParser


def add_model_commands(commands: Commands[argparse.ArgumentParser]) -> None:
    add_pull_options(
        commands.add_parser(
            "pull",
            help="download a model",
            description="Downloads a model into the cache. A download that was interrupted goes on where it "
            "ended.",
        )
    )
    listing = commands.add_parser(
        "list",
        aliases=["ls"],
        help="list the cached models",
        description="Lists the models in Outrider's cache and in the Hugging Face cache.",
    )
    add_list_options(listing)
    show = commands.add_parser(
        "show",
        help="show the facts of a model on this machine",
        description="Shows family, size, context, quantisation, head and sampling defaults of a model, from "
        "its files. Nothing is loaded or downloaded.",
    )
    show.add_argument("name", help="model folder, GGUF file, or a name in the list of `outrider list`")
    show.add_argument("--json", action="store_true", help="print the facts as JSON")
    show.set_defaults(run=run_show)
    add_rm_options(
        commands.add_parser(
            "rm",
            help="remove a cached model",
            description="Asks, then removes a model from the cache.",
        )
    )


def run_show(args: argparse.Namespace) -> int:
    from outrider.terminal import console_for, new_table

    facts = _facts(args.name)
    if args.json:
        print(json.dumps(facts, indent=2))
        return 0
    table = new_table("", "")
    for name, value in facts.items():
        if value is not None:
            table.add_row(name.replace("_", " "), _shown(name, value))
    console_for(sys.stdout).print(table)
    return 0


def _shown(name: str, value: Any) -> str:
    if name.endswith("bytes"):
        return size_text(value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {one}" for key, one in value.items())
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _facts(name: str) -> dict[str, Any]:
    """Raises ModelUnavailable if the model is not on this machine or its files are damaged."""
    from outrider.models.files import generation_config
    from outrider.models.files.shipped_head import shipped_head
    from outrider.models.files.weight_size import estimated_bytes
    from outrider.models.heads import find_head
    from outrider.models.loader import max_context, read_config

    folder = _local_folder(name)
    config = read_config(folder)
    quantization = config.get("quantization")
    bits = quantization.get("bits") if isinstance(quantization, dict) else None
    head = find_head(folder) or shipped_head(folder)
    is_snapshot = folder.parent.name == "snapshots"
    return {
        "name": name,
        "path": str(folder),
        "commit": folder.name if is_snapshot else None,
        "family": config["model_type"],
        "file_bytes": sum(file.stat().st_size for file in folder.glob("*.safetensors")),
        "loaded_bytes": estimated_bytes(folder, config),
        "weight_bits": bits,
        "context": max_context(config),
        "head": None if head is None else str(head),
        "reads_images": "vision_config" in config,
        "sampling": generation_config.sampling_defaults(folder).given or None,
    }


def _local_folder(name: str) -> Path:
    from outrider.models.files.cached import find_cached
    from outrider.models.gguf import convert

    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_file() and path.suffix == ".gguf":
        return convert.ensure_converted(path)
    if path.is_file():
        raise ModelUnavailable(f"{path} is a file, but a model is a .gguf file or a folder.")
    return find_cached(name).path
