"""What `outrider serve` refuses on several ranks, and how it says so. The docs list the same options."""

from __future__ import annotations

import faulthandler
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from test_serve import options

from absent_ranks import AbsentRanks
from outrider.api.operations.metrics import Metrics
from outrider.cli.model_source import ServedModelSource, SharedParts
from outrider.cli.model_specs import model_specs
from outrider.cli.serve_options import OPTIONS
from outrider.cli.tensor_parallel import ON_ONE_RANK, OtherRanks, is_on_ranks, join, spec_of_ranks
from outrider.config import InvalidConfig

DOCS = Path(__file__).parents[2] / "docs" / "DEPLOYMENT.md"
VALUES = {"memory_limit": "8GB", "idle_unload": "10m"}  # of options that take more than a word


@pytest.fixture(autouse=True)
def not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLX_RANK", raising=False)


def test_ranks_are_asked_for_by_the_option_or_by_mlx_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_on_ranks(options("m"))
    assert not is_on_ranks(options("m", "--tensor-parallel", "1"))
    assert is_on_ranks(options("m", "--tensor-parallel", "2"))
    monkeypatch.setenv("MLX_RANK", "0")
    assert is_on_ranks(options("m"))


@pytest.mark.parametrize("key", ON_ONE_RANK)
def test_an_option_that_needs_one_rank_is_refused_with_what_to_do(key: str) -> None:
    flag = OPTIONS[key].flag
    with pytest.raises(InvalidConfig) as refused:
        spec_of_ranks(options("m", "--tensor-parallel", "2", flag, VALUES.get(key, "x")))
    assert str(refused.value) == f"{flag} cannot be used on several ranks. {ON_ONE_RANK[key]}"


def test_an_option_in_the_table_of_the_model_is_refused_too(tmp_path: Path) -> None:
    file = tmp_path / "outrider.toml"
    file.write_text('[models.coder]\npath = "m"\ndraft-model = "d"\n')
    with pytest.raises(InvalidConfig, match=r"^--draft-model cannot be used on several ranks"):
        spec_of_ranks(options("--config", str(file), "--tensor-parallel", "2"))


def test_all_other_options_are_taken() -> None:
    flags = ("--adapters", "sql=dir", "--kv-bits", "8", "--prefix-cache-dir", "d", "--drafter", "ngram")
    assert spec_of_ranks(options("m", "--tensor-parallel", "2", *flags)).name == "m"


def test_several_models_are_refused_by_name() -> None:
    with pytest.raises(InvalidConfig, match=r"^several ranks serve one model, not 2 \(a, b\): name one"):
        spec_of_ranks(options("a", "b", "--tensor-parallel", "2"))


def test_an_embedding_model_is_refused(tmp_path: Path) -> None:
    ranks: Any = AbsentRanks(0, 2)
    (spec,) = model_specs(options(str(tmp_path)))
    source = ServedModelSource(spec, SharedParts(Metrics(), ranks=ranks))
    with pytest.raises(InvalidConfig, match="makes embeddings, and such a model runs on one rank"):
        source._load_embedder(tmp_path, None, lambda: None)


@pytest.mark.parametrize("num", [-1, 0, 65])
def test_a_number_of_ranks_that_cannot_be_is_refused(num: int) -> None:
    with pytest.raises(InvalidConfig, match=f"--tensor-parallel must be 1 to 64, not {num}"):
        join(num, 1.0, [], OtherRanks())


def test_another_number_than_that_of_mlx_launch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_RANK", "0")
    monkeypatch.setattr(mx.distributed, "init", lambda strict: AbsentRanks(0, 2))
    with pytest.raises(InvalidConfig, match=r"--tensor-parallel 3, but mlx\.launch has started 2 processes"):
        join(3, 1.0, [], OtherRanks())
    faulthandler.cancel_dump_traceback_later()


def test_ranks_that_do_not_meet_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(strict: bool) -> None:
        raise RuntimeError("no route to host")

    monkeypatch.setenv("MLX_RANK", "1")
    monkeypatch.setattr(mx.distributed, "init", fail)
    with pytest.raises(InvalidConfig, match="rank 1 could not join the others: no route to host"):
        join(None, 1.0, [], OtherRanks())
    faulthandler.cancel_dump_traceback_later()


def test_the_docs_name_every_option_that_is_refused() -> None:
    (row,) = [line for line in DOCS.read_text().splitlines() if line.startswith("| refused, ")]
    assert [flag for flag in (OPTIONS[key].flag for key in ON_ONE_RANK) if f"`{flag}`" not in row] == []
