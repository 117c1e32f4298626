"""The banner shows what is switched off, once, when the server is ready."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from outrider import fallbacks
from outrider.api.settings import ServerSettings
from outrider.cli.banner import banner
from outrider.engine.validation import ModelFacts

FACTS = ModelFacts("m", 10, 100, frozenset(), "none", device="some GPU")


@pytest.fixture(autouse=True)
def no_fallbacks() -> Iterator[None]:
    fallbacks.clear()
    yield
    fallbacks.clear()


def text() -> str:
    return banner(FACTS, ServerSettings(), 1 << 30, "auto", "http://x", "not cached")


def test_switched_off_parts_are_in_the_banner() -> None:
    assert "slower" not in text()
    fallbacks.note("delta-rule kernels", "they are off by 2.0e-01", "slower MLX operations")
    fallbacks.note("own matmul", "no C compiler", "OpenBLAS")
    (line,) = (line for line in text().splitlines() if line.startswith("  slower"))
    assert "without delta-rule kernels (they are off by 2.0e-01): using slower MLX operations" in line
    assert "without own matmul (no C compiler): using OpenBLAS" in line
    assert "`outrider doctor`" in line
