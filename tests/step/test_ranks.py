"""What passes between ranks beside the steps: facts that have to be the same, and wake-ups."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from outrider.models.files.weights_digest import SAMPLE_BYTES, weights_digest
from outrider.step.ranks import Ranks
from patience import PATIENCE_S
from rank_processes import free_ports

PROGRAM = """
import sys
import mlx.core as mx
from outrider.step.ranks import Ranks, RanksDiffer
ranks = Ranks(mx.distributed.init(strict=True))
ranks.check_same({"model": "tiny", "weights": "12"})
assert ranks.smallest(2**40 + 5 * ranks.rank) == 2**40
assert ranks.smallest(7 - ranks.rank) == 6
try:
    ranks.check_same({"model": "tiny", "weights": sys.argv[1]})
except RanksDiffer as error:
    print(error)
"""


def test_ranks_that_differ_are_told_the_fingerprint_of_each(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(2)]))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, weights],
            env={**os.environ, "MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, weights in enumerate(("mine", "yours"))
    ]
    try:
        texts = [rank.communicate(timeout=PATIENCE_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    fingerprints = [text.split("rank 0: ")[1].split("; here")[0] for text in texts]
    assert fingerprints[0] == fingerprints[1]
    first, second = fingerprints[0].split(", rank 1: ")
    assert first != second
    assert "They differ in weights (" in texts[0]
    assert "model (" not in texts[0]
    assert "here, on rank 0: mine" in texts[0]
    assert "here, on rank 1: yours" in texts[1]


class OneRank:
    def __init__(self, rank: int) -> None:
        self._rank = rank

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return 2


class SignalLog:
    def __init__(self) -> None:
        self.log: list[str] = []

    def wake(self) -> None:
        self.log.append("wake")

    def wait(self) -> None:
        self.log.append("wait")


def a_rank(rank: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[str]]:
    signals = SignalLog()
    ranks: Any = Ranks(OneRank(rank), signals)  # type: ignore[arg-type]
    monkeypatch.setattr(ranks, "_first", lambda numbers: signals.log.append("meet") or mx.array(numbers))
    return ranks, signals.log


def test_rank_0_wakes_the_others_once_after_a_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, log = a_rank(0, monkeypatch)
    ranks.send([1])
    ranks.rest()
    ranks.send([2])
    ranks.send([3])
    assert log == ["meet", "wake", "meet", "meet"]


def test_another_rank_waits_when_it_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, log = a_rank(1, monkeypatch)
    ranks.rest()
    ranks.receive()
    assert log == ["wait", "meet"]


def test_without_signals_a_rest_does_nothing() -> None:
    for rank in (0, 1):
        Ranks(OneRank(rank)).rest()  # type: ignore[arg-type]


def test_weight_files_of_the_same_size_have_another_digest_if_their_bytes_differ(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    data = np.random.default_rng(0).bytes(1_000_000)
    file.write_bytes(data)
    digest = weights_digest(tmp_path)
    assert weights_digest(tmp_path) == digest
    file.write_bytes(data[:-1] + b"!")
    assert weights_digest(tmp_path) != digest
    middle = len(data) // 2  # a change longer than the distance of two samples
    file.write_bytes(data[:middle] + bytes(4 * SAMPLE_BYTES) + data[middle + 4 * SAMPLE_BYTES :])
    assert weights_digest(tmp_path) != digest
    file.write_bytes(data)
    assert weights_digest(tmp_path) == digest
    (tmp_path / "head.safetensors").write_bytes(b"only rank 0 reads it")
    assert weights_digest(tmp_path) == digest
