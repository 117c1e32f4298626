"""`outrider ps` and `outrider stop`: the models of a running server, over HTTP."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any
from urllib.parse import quote

from outrider.cli.models import size_text
from outrider.config import InvalidConfig

Commands = argparse._SubParsersAction  # of argparse.ArgumentParser

DEFAULT_URL = "http://127.0.0.1:8000"
KEY_VARIABLES = ("OUTRIDER_OPERATOR_KEY", "OUTRIDER_API_KEY")
TIMEOUT_S = 60.0  # for the answer of the server: an unloading takes a moment; chosen by hand


def add_running_models(commands: Commands[argparse.ArgumentParser]) -> None:
    ps = commands.add_parser(
        "ps",
        help="list the models of a running server",
        description="Lists the models of a running server and what each of them does.",
    )
    ps.add_argument("--json", action="store_true", help="print the list as JSON")
    ps.set_defaults(run=run_ps)
    stop = commands.add_parser(
        "stop",
        help="unload a model of a running server",
        description="Unloads a model of a running server: now, or after its last request. The next request "
        "for the model loads it again.",
    )
    stop.add_argument("name", help="the model's name in the list of `outrider ps`")
    stop.set_defaults(run=run_stop)
    for command in (ps, stop):
        command.add_argument("--url", default=DEFAULT_URL, help="address of the server (%(default)s)")
        keys = " or ".join(f"${name}" for name in KEY_VARIABLES)
        command.add_argument("--api-key", metavar="KEY", help=f"an operator's key (default: {keys})")


def run_ps(args: argparse.Namespace) -> int:
    from outrider.terminal import console_for, new_table

    models = _ask(args, "GET", "/v1/status")["models"]
    if args.json:
        print(json.dumps(models, indent=2))
        return 0
    table = new_table("NAME", "STATE", "MEMORY", "REQUESTS", "UNLOADS")
    for model in models:
        memory = size_text(model["reserved_bytes"]) if model["reserved_bytes"] else "-"
        table.add_row(model["name"], _state(model), memory, str(model["requests"]), _unloads(model))
    console_for(sys.stdout).print(table)
    return 0


def run_stop(args: argparse.Namespace) -> int:
    model = _ask(args, "POST", f"/v1/models/{quote(args.name, safe='')}/unload")
    if model["state"] == "loaded":
        print(f"{model['name']} is unloaded when its {model['requests']} running requests have ended.")
    else:
        print(f"{model['name']} is not loaded now.")
    return 0


def _state(model: dict[str, Any]) -> str:
    state = str(model["state"]).replace("_", " ")
    if model["stage"] is None:
        return f"{state}: {model['failure']}" if model["failure"] else state
    progress = "" if model["progress"] is None else f", {model['progress']:.0%}"
    return f"{state} ({model['stage']}{progress})"


def _unloads(model: dict[str, Any]) -> str:
    if model["pinned"]:
        return "never: pinned"
    return "-" if model["unloads_in_s"] is None else f"in {model['unloads_in_s']:.0f} s"


def _ask(args: argparse.Namespace, method: str, path: str) -> Any:
    """The server's answer. Raises InvalidConfig, with the server's reason."""
    import httpx

    from outrider.server_address import ServerAddress

    key = args.api_key or next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), None)
    address = ServerAddress.parse(args.url, key)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        with httpx.Client(base_url=str(address), trust_env=False, timeout=TIMEOUT_S) as client:
            response = client.request(method, path, headers=headers)
        body = response.json()
    except httpx.HTTPError as error:
        raise InvalidConfig(f"no server answers at {address}: {error}. Start one, or give --url.") from None
    except ValueError:
        raise InvalidConfig(f"{address} is not an Outrider server: {path} is no JSON") from None
    if response.status_code != 200:
        raise InvalidConfig(f"{address}: {_reason(body)}")
    return body


def _reason(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message", error)) if isinstance(error, dict) else str(body)[:200]
