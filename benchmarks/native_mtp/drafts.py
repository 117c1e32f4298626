"""Whether a server with MTP really drafts: the counts that it reports about itself.

A server may take the flag and decode without drafts. Speed alone would not show the difference.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from outrider.bench.http_target import parse_metrics

TIMEOUT_S = 60.0  # seconds for a report; chosen by hand
Counts = tuple[int, int]  # drafts, accepted drafts
RAPID_METRIC = r"^rapid_mlx_spec_decode_{}_total(?:\{{[^}}]*\}})? (\S+)$"


def report(package: str, port: int, model: str) -> Counts | None:
    """None if the server reports no counts."""
    read = READERS.get(package)
    if read is None:
        return None
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT_S, trust_env=False) as client:
            return read(client, model)
    except (httpx.HTTPError, ValueError, LookupError, TypeError):
        return None


def drafts_text(server: str, counts: Counts | None) -> str:
    if counts is None:
        return f"{server} does not report its drafts."
    drafted, accepted = counts
    if not drafted:
        return f"{server} has made no drafts, although it was started with MTP."
    return f"{server} reports {drafted} drafts, of which {accepted / drafted:.0%} were accepted."


def of_outrider(client: httpx.Client, model: str) -> Counts:
    found = parse_metrics(client.get("/metrics").text)
    return sum(found.drafted), sum(found.accepted)


def of_vllm_mlx(client: httpx.Client, model: str) -> Counts:
    found: Mapping[str, Any] = client.get("/v1/status").json()["mtp"]
    return int(found.get("attempted", 0)), int(found.get("accepted", 0))


def of_mlx_vlm(client: httpx.Client, model: str) -> Counts:
    """Of one request: the server has no totals."""
    message = {"role": "user", "content": "Count from 3 in steps of 4."}
    body = {"model": model, "messages": [message], "max_tokens": 48, "temperature": 0}
    timings = client.post("/v1/chat/completions", json=body).json()["timings"]
    return int(timings.get("draft_n") or 0), int(timings.get("draft_n_accepted") or 0)


def of_rapid_mlx(client: httpx.Client, model: str) -> Counts:
    text = client.get("/metrics").text
    return _total(text, "attempts"), _total(text, "accepts")


def _total(text: str, name: str) -> int:
    found = re.findall(RAPID_METRIC.format(name), text, re.MULTILINE)
    return int(sum(float(value) for value in found))


READERS: dict[str, Callable[[httpx.Client, str], Counts]] = {
    "outrider": of_outrider,
    "vllm-mlx": of_vllm_mlx,
    "mlx-vlm": of_mlx_vlm,
    "rapid-mlx": of_rapid_mlx,
}
