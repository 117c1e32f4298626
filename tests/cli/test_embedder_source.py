"""`outrider serve` with an embedding model refuses the options that have no meaning there."""

from __future__ import annotations

import pytest
from test_serve import options

from outrider.cli.embedder_source import check_options, model_facts
from outrider.config import InvalidConfig
from outrider.pooling import PoolingFacts


@pytest.mark.parametrize(
    "flags",
    [
        ("--mtp", "on"),
        ("--draft-depth", "2"),
        ("--default-temperature", "0.5"),
        ("--tool-call-parser", "hermes"),
        ("--max-rows", "4"),
        ("--memory-budget", "1GB"),
        ("--no-prefix-cache",),
        ("--max-images", "3"),
    ],
)
def test_options_of_text_models_are_refused_by_name(flags: tuple[str, ...]) -> None:
    with pytest.raises(InvalidConfig, match=f"^{flags[0]} is for models that generate text, and m makes"):
        check_options(options(*flags), "m")


def test_all_other_options_are_taken() -> None:
    check_options(options("--max-queue", "3", "--dtype", "float32", "--max-context", "99"), "m")


def test_facts_for_the_routes_that_all_servers_have() -> None:
    facts = model_facts(PoolingFacts("n", "embedding", 8, 99, 50, "mean", True, 512, "float32", "cpu"))
    assert (facts.name, facts.max_context, facts.vocab_size, facts.drafter) == ("n", 99, 50, "none")
