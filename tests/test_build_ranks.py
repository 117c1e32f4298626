"""What an engine on several ranks may have."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.build_caches import prefix_disk
from outrider.build_controller import fingerprint
from outrider.build_ranks import adapters_of_ranks, config_for_ranks, free_bytes_of_ranks
from outrider.config import EngineConfig, InvalidConfig
from outrider.engine.adapters import AdapterConflict, AdapterRefused


class SameRanks:
    """Two ranks. The other one has the same facts, and no folder for cached prefixes."""

    size = 2

    def __init__(self) -> None:
        self.facts: dict[str, str] = {}

    def check_same(self, facts: dict[str, str]) -> None:
        self.facts |= facts

    def digests(self, text: str) -> list[str]:
        return [hashlib.sha256(own.encode()).hexdigest() for own in (text, "")]


def test_ranks_have_the_adapters_of_the_start_only() -> None:
    ranks: Any = SameRanks()
    assert config_for_ranks(EngineConfig(max_adapters=16), 2, ranks).max_adapters == 2
    assert config_for_ranks(EngineConfig(max_adapters=16), 2, None).max_adapters == 16
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


class RanksOnMachines:
    """Rank 0, on its own machine or on that of the others."""

    rank = 0

    def __init__(self, is_on_own_machine: list[bool], free_bytes: int) -> None:
        self._is_on_own_machine = is_on_own_machine
        self._free_bytes = free_bytes  # what another rank can take

    def digests(self, text: str) -> list[str]:
        return [text if is_own else "elsewhere" for is_own in self._is_on_own_machine]

    def smallest(self, number: int) -> int:
        return min(number, self._free_bytes)


@pytest.mark.parametrize(
    ("is_on_own_machine", "free_bytes", "wanted"),
    [
        ([True, False], 900, 600),
        ([True, False], 500, 500),
        ([True, True, True], 900, 200),
        ([True, True, False], 100, 100),
    ],
)
def test_each_rank_takes_what_the_fullest_machine_leaves(
    is_on_own_machine: list[bool], free_bytes: int, wanted: int
) -> None:
    ranks: Any = RanksOnMachines(is_on_own_machine, free_bytes)
    assert free_bytes_of_ranks(600, ranks) == wanted
    assert free_bytes_of_ranks(600, None) == 600


def test_a_folder_for_cached_prefixes_on_some_ranks_only_is_refused(tmp_path: Path) -> None:
    ranks: Any = SameRanks()
    with pytest.raises(InvalidConfig, match="some ranks have --prefix-cache-dir and others have not"):
        prefix_disk("abcd", EngineConfig(prefix_cache_dir=str(tmp_path)), ranks)
    assert prefix_disk("", EngineConfig(), ranks) is None


def test_costs_that_one_rank_has_measured_are_not_those_of_two(tmp_path: Path) -> None:
    loaded: Any = SimpleNamespace(path=tmp_path, config={"model_type": "llama"})
    facts: Any = SimpleNamespace(
        device="cpu", dtype="float32", weight_bits=(), kv_bits=None, drafter="none", draft_model=None,
        rank_head="whole",
    )  # fmt: skip
    ranks: Any = SameRanks()
    names = [fingerprint(loaded, None, None, facts, 4, None, given) for given in (None, ranks, None)]
    assert names[0] == names[2] != names[1]
    facts.rank_head = "divided"
    assert fingerprint(loaded, None, None, facts, 4, None, ranks) not in names
