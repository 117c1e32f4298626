"""`outrider models`: lists the cached models, downloads and removes them."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.models.errors import ModelUnavailable

if TYPE_CHECKING:
    from outrider.models.files.cached import CachedModel

Commands = argparse._SubParsersAction  # of argparse.ArgumentParser


def add_models(commands: Commands[argparse.ArgumentParser]) -> None:
    models = commands.add_parser(
        "models",
        help="list, download and remove cached models",
        description="Without a VERB, lists the models in Outrider's cache and in the Hugging Face cache.",
    )
    add_list_options(models)
    verbs = models.add_subparsers(metavar="VERB")
    add_pull_options(
        verbs.add_parser("pull", help="download a model", description="Downloads a model into the cache.")
    )
    add_rm_options(
        verbs.add_parser(
            "rm", help="remove a cached model", description="Asks, then removes a model from the cache."
        )
    )


def add_list_options(listing: argparse.ArgumentParser) -> None:
    listing.add_argument("--json", action="store_true", help="print the list as JSON")
    listing.set_defaults(run=run_list)


def add_pull_options(pull: argparse.ArgumentParser) -> None:
    pull.add_argument(
        "name", help="a Hugging Face id, or SmolLM2-135M-Instruct, outrider-vision-135m, all-minilm-l6-v2"
    )
    pull.add_argument(
        "--revision", metavar="REVISION", help="commit, tag or branch of a Hugging Face id (main)"
    )
    pull.set_defaults(run=run_pull)


def add_rm_options(rm: argparse.ArgumentParser) -> None:
    rm.add_argument("name", help="the model's name in the list of `outrider models`")
    rm.add_argument("--yes", action="store_true", help="do not ask")
    rm.set_defaults(run=run_rm)


def run_list(args: argparse.Namespace) -> int:
    from outrider.models.files.cached import cached_models
    from outrider.models.files.folders import models_folder
    from outrider.terminal import console_for, new_table

    models = cached_models()
    if args.json:
        print(json.dumps([_record(one) for one in models], indent=2))
    elif models:
        table = new_table("NAME", "SIZE", "HEAD", "FROM")
        for one in models:
            table.add_row(*_row(one))
        console_for(sys.stdout).print(table)
    else:
        print(
            f"There are no models in {models_folder()} or in the Hugging Face cache. "
            "Download one: outrider models pull NAME"
        )
    return 0


def run_pull(args: argparse.Namespace) -> int:
    path = _pull(args.name, args.revision)
    commit = f" (commit {path.name})" if path.parent.name == "snapshots" else ""
    print(f"{args.name} is in {path}{commit}")
    return 0


def run_rm(args: argparse.Namespace) -> int:
    from outrider.models.files.cached import find_cached, remove

    model = find_cached(args.name)
    question = f"Remove {model.name} ({size_text(model.num_bytes)}, {model.path})? [y/N] "
    if not args.yes and not _is_confirmed(question):
        print("Nothing was removed.", file=sys.stderr)
        return 1
    remove(model)
    print(f"Removed {model.name} ({size_text(model.num_bytes)}).")
    return 0


def _pull(name: str, revision: str | None) -> Path:
    from outrider.models import loader
    from outrider.models.files.named import make_ready, named_model

    if (own := named_model(name)) is not None and revision is None:
        return make_ready(own)
    if Path(name).expanduser().exists():
        raise ModelUnavailable(f"{name} is on this machine already: there is nothing to download.")
    return loader.find_folder(name, revision)


def _is_confirmed(question: str) -> bool:
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _record(model: CachedModel) -> dict[str, object]:
    return {
        "name": model.name,
        "place": model.place,
        "path": str(model.path),
        "bytes": model.num_bytes,
        "shared_bytes": model.shared_bytes,
        "source": model.source,
        "head": None if model.head is None else str(model.head),
        "head_bytes": model.head_bytes,
        "intact": model.is_intact,
    }


def _row(model: CachedModel) -> tuple[str, str, str, str]:
    head = "-" if model.head is None else size_text(model.head_bytes)
    note = "" if model.is_intact else " (incomplete or in an older format: built again at the next use)"
    shared = f" + {size_text(model.shared_bytes)} shared" if model.shared_bytes else ""
    return model.name, size_text(model.num_bytes) + shared, head, model.source + note


def size_text(num_bytes: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes} B"
