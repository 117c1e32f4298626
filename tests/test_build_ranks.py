"""What an engine on several ranks may have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from outrider.build_ranks import adapters_of_ranks, checked_for_ranks
from outrider.config import EngineConfig, InvalidConfig
from outrider.engine.adapters import AdapterConflict, AdapterRefused


class SameRanks:
    def __init__(self) -> None:
        self.facts: dict[str, str] = {}

    def check_same(self, facts: dict[str, str]) -> None:
        self.facts |= facts


def test_what_ranks_cannot_have_is_refused_by_name() -> None:
    ranks: Any = SameRanks()
    with pytest.raises(InvalidConfig, match="a draft model cannot be used on several ranks"):
        checked_for_ranks(EngineConfig(), ["a draft model"], 0, ranks)
    assert checked_for_ranks(EngineConfig(), ["a draft model"], 0, None) == EngineConfig()


def test_ranks_have_the_adapters_of_the_start_only() -> None:
    ranks: Any = SameRanks()
    assert checked_for_ranks(EngineConfig(max_adapters=16), [], 2, ranks).max_adapters == 2
    info = SimpleNamespace(id=1, name="sql", fingerprint="ab12")
    adapters: Any = SimpleNamespace(loaded={"sql": info}, num_bytes=7, reader=None)
    store = adapters_of_ranks(adapters, ranks)
    assert "ab12" in ranks.facts["adapters"]
    assert store.loaded == {"sql": info}
    with pytest.raises(AdapterRefused, match="--adapters"):
        store.load("poem", None)
    with pytest.raises(AdapterConflict, match="sql stays loaded"):
        store.unload("sql")
    assert adapters_of_ranks(adapters, None) is adapters
