"""Starts llama.cpp's server from the wheel `xllamacpp`, for benchmarks/peers.py.

    python benchmarks/llama_cpp_server.py FILE.gguf --port 8081 --slots 16 --context 2048 --threads 2

Runs with a Python that has xllamacpp; Outrider need not be installed there. SIGTERM ends the server.
"""

from __future__ import annotations

import argparse
import threading

import xllamacpp

WARNINGS = 2  # llama.cpp's verbosity: errors and warnings. From 3 on, every request is logged.


def main() -> None:
    args = _arguments()
    server = xllamacpp.Server(_params(args))  # raises RuntimeError if the file cannot be loaded
    print(f"llama.cpp (xllamacpp {xllamacpp.__version__}) at {server.listening_address}", flush=True)
    print(xllamacpp.get_system_info(), flush=True)
    threading.Event().wait()


def _params(args: argparse.Namespace) -> xllamacpp.CommonParams:
    """llama-server's defaults, but for what is set here."""
    params = xllamacpp.CommonParams()
    params.model.path = args.model
    params.hostnames = ["127.0.0.1"]
    params.port = args.port
    params.n_parallel = args.slots
    params.n_ctx = args.slots * args.context  # the slots share it equally
    params.cpuparams.n_threads = args.threads  # for decoding; also for prompts, unless set otherwise
    params.verbosity = WARNINGS
    # Every prompt is computed whole, as by Outrider, whose requests have a cache salt each.
    params.cache_prompt = False
    params.cache_ram_mib = 0
    params.slot_prompt_similarity = 0.0
    return params


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="GGUF file")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--slots", type=int, default=1, help="requests decoded at once (default: 1)")
    parser.add_argument("--context", type=int, default=2048, help="tokens of a slot (default: 2048)")
    parser.add_argument("--threads", type=int, default=-1, help="(default: llama.cpp's own)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
