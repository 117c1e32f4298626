"""What is counted: steps by what ran in them, drafts by position, requests by how they ended."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from fake_backend import CUT, HELLO, USER, Client, FakeBackend, server
from prometheus_client.parser import text_string_to_metric_families
from step_rows import row, step

from outrider.api.operations.step_metrics import StepMetrics, row_kind
from outrider.plan import RowPlan
from patience import measures_time


def samples(client: Client) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def scraped(metrics: StepMetrics) -> dict[str, float]:
    made = server(FakeBackend())
    made.context.live.metrics.registry.unregister(made.context.live.metrics.steps)
    made.context.live.metrics.registry.register(metrics)
    return samples(Client(made))


@pytest.mark.parametrize(
    ("planned", "kind"),
    [
        (row(0, 1), "plain"),
        (row(0, 3, 2), "speculating"),
        (row(0, 5, start=0), "prefill"),
        (row(0, 1, start=4), "prefill"),  # a prompt's last token
        (row(0, 1, start=5), "plain"),
        (row(0, 4, start=8), "prefill"),  # computed again after a preemption
    ],
)
def test_kind_of_a_row(planned: RowPlan, kind: str) -> None:
    assert row_kind(planned) == kind


def test_steps_are_counted_by_what_ran_together() -> None:
    metrics = StepMetrics()
    step(metrics, (row(0, 1), 1))
    step(metrics, (row(0, 3, 2), 2))
    step(metrics, (row(0, 1), 1), (row(1, 4, 3), 4), (row(2, 8, start=0), 1))
    step(metrics, (row(2, 8, start=0), 0))
    found = scraped(metrics)
    assert found["outrider_steps_total{rows=plain}"] == 1
    assert found["outrider_steps_total{rows=speculating}"] == 1
    assert found["outrider_steps_total{rows=plain_and_speculating}"] == 1
    assert found["outrider_steps_total{rows=prefill_only}"] == 1
    assert found["outrider_row_steps_total{kind=prefill}"] == 2
    assert found["outrider_prefilled_tokens_total{}"] == 16
    assert found["outrider_committed_tokens_total{}"] == 9
    assert found["outrider_step_seconds_count{}"] == 4
    assert found["outrider_step_seconds_sum{}"] == pytest.approx(0.016)
    assert found["outrider_step_seconds_bucket{le=0.005}"] == 4


def test_drafts_are_counted_by_position() -> None:
    metrics = StepMetrics()
    step(metrics, (row(0, 4, 3), 3))  # two of three stood
    step(metrics, (row(0, 3, 2), 1))  # none
    found = scraped(metrics)
    assert [found[f"outrider_drafted_tokens_total{{position={i}}}"] for i in (1, 2, 3, 4)] == [2, 2, 1, 0]
    assert [found[f"outrider_accepted_tokens_total{{position={i}}}"] for i in (1, 2, 3)] == [1, 1, 0]
    assert found["outrider_stride_tokens_bucket{le=1.0}"] == 1
    assert found["outrider_stride_tokens_bucket{le=3.0}"] == 2
    assert found["outrider_stride_tokens_sum{}"] == 4


def test_gauges_show_the_last_step_and_nothing_when_idle() -> None:
    metrics = StepMetrics()
    step(metrics, (row(0, 1), 1), (row(1, 2, 1), 2), waiting=3, cache=1000)
    found = scraped(metrics)
    assert found["outrider_rows{kind=plain}"] == 1
    assert found["outrider_rows{kind=speculating}"] == 1
    assert found["outrider_depth{}"] == 0.5
    assert found["outrider_waiting_requests{}"] == 3
    assert found["outrider_cache_bytes{}"] == 1000
    metrics.is_idle = lambda: True
    found = scraped(metrics)
    assert (
        found["outrider_rows{kind=plain}"]
        == found["outrider_cache_bytes{}"]
        == found["outrider_depth{}"]
        == 0
    )


def test_pictures_are_counted_by_piece_and_stay_when_idle() -> None:
    metrics = StepMetrics()
    metrics.on_encode(0.003)
    metrics.on_encode(0.03)
    metrics.on_embedding_cache(num_hits=5, num_bytes=640)
    metrics.is_idle = lambda: True
    found = scraped(metrics)
    assert found["outrider_image_pieces_encoded_total{}"] == 2
    assert found["outrider_image_encode_seconds_count{}"] == 2
    assert found["outrider_image_encode_seconds_sum{}"] == pytest.approx(0.033)
    assert found["outrider_image_encode_seconds_bucket{le=0.005}"] == 1
    assert found["outrider_image_cache_hits_total{}"] == 5
    assert found["outrider_image_cache_bytes{}"] == 640


@measures_time
def test_observer_is_cheap() -> None:
    metrics = StepMetrics()
    rows = [(row(i, 4, 3), 2) for i in range(16)]
    started = time.perf_counter()
    for _ in range(200):
        step(metrics, *rows)
    assert (time.perf_counter() - started) / 200 < 0.001  # of 16 rows, building the plan included


def test_requests_are_counted_by_api_and_end() -> None:
    backend = FakeBackend(HELLO)
    client = Client(server(backend))
    client.post("/v1/chat/completions", {"messages": USER, "n": 2})
    client.post("/v1/messages", {"messages": USER, "max_tokens": 5})
    backend.events = CUT
    client.post("/v1/responses", {"input": "Hi"})
    client.post("/v1/completions", {"prompt": 5})
    found = samples(client)
    assert found["outrider_requests_total{api=chat,finish=stop}"] == 2
    assert found["outrider_requests_total{api=messages,finish=stop}"] == 1
    assert found["outrider_requests_total{api=responses,finish=length}"] == 1
    assert found["outrider_tokens_total{kind=prompt}"] == 28
    assert found["outrider_tokens_total{kind=generated}"] == 20
    assert found["outrider_tokens_total{kind=cached}"] == 12
    assert found["outrider_time_to_first_token_seconds_count{api=chat}"] == 2
    assert found["outrider_inter_token_seconds_count{api=chat}"] == 2
    assert found["outrider_http_requests_total{method=POST,route=/v1/completions,status=400}"] == 1
    assert found["outrider_live_requests{}"] == 0


def test_paths_that_do_not_exist_share_one_label() -> None:
    client = Client(server(FakeBackend()))
    for i in range(5):
        client.get(f"/nowhere/{i}")
    routes = [name for name in samples(client) if name.startswith("outrider_http_requests_total")]
    assert routes == ["outrider_http_requests_total{method=GET,route=none,status=404}"]


def test_status_shows_the_model_and_the_live_rows() -> None:
    made = server(FakeBackend())
    steps = made.context.live.metrics.steps
    steps.is_idle = lambda: False
    step(steps, (row(4, 3, 2), 1), (replace(row(5, 1), has_images=True), 1), waiting=1, cache=77)
    status: dict[str, Any] = Client(made).get("/v1/status").json()
    assert status["model"]["name"] == "tiny"
    assert status["rows"] == [
        {
            "sequence": 4,
            "kind": "speculating",
            "cells": 13,
            "drafts": 2,
            "prompt_tokens": 5,
            "images": False,
        },
        {"sequence": 5, "kind": "plain", "cells": 11, "drafts": 0, "prompt_tokens": 5, "images": True},
    ]
    assert (status["waiting"], status["cache_bytes"], status["steps"]) == (1, 77, 1)
    assert status["drafted_by_position"][:3] == [1, 1, 0]
