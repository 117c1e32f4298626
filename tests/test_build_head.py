"""Whether the ranks of a model divide its MTP head: by option, by what they have, by what drafts faster."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from outrider import build_head
from outrider.build_head import ChosenHead, HeadCandidates, HeadSource, choose, load_candidates
from outrider.build_ranks import config_for_ranks
from outrider.config import EngineConfig, InvalidConfig

NO_FILE = Path("head.safetensors")
WHOLE: Any = SimpleNamespace(is_divided=False, spec="s", draft_ids=None, weight_files=[NO_FILE])
DIVIDED: Any = SimpleNamespace(is_divided=True, spec="s", draft_ids=None, weight_files=[NO_FILE])
TRUNK: Any = None


class Rank0:
    """Rank 0 of two. `can_divide`: whether the other rank has its part of the head."""

    rank, size = 0, 2

    def __init__(self, can_divide: bool = True) -> None:
        self._can_divide = can_divide
        self.facts: dict[str, str] = {}
        self.sent: list[list[int]] = []

    def count(self, flags: list[bool]) -> list[int]:
        has_whole, has_part = flags
        return [int(has_whole), int(has_part) + self._can_divide]

    def check_same(self, facts: dict[str, str]) -> None:
        self.facts |= facts

    def send(self, numbers: list[int]) -> None:
        self.sent.append(numbers)


def chosen(candidates: HeadCandidates, rank_head: Any, ranks: Any) -> tuple[ChosenHead, str]:
    found = choose(candidates, TRUNK, rank_head, ranks)
    return found, found.reason or ""


@pytest.mark.parametrize(("divided_s", "is_divided"), [(0.5e-3, True), (0.99e-3, False), (3e-3, False)])
def test_auto_takes_what_drafts_faster_and_tells_the_others(
    divided_s: float, is_divided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_head.head_timing, "shortest_s", lambda *_: (1e-3, divided_s))
    ranks: Any = Rank0()
    found, reason = chosen(HeadCandidates(WHOLE, DIVIDED), "auto", ranks)
    assert found.head is (DIVIDED if is_divided else WHOLE)
    assert found.rank_head == ("divided" if is_divided else "whole")
    assert reason == f"measured: a draft takes 1.00 ms whole, {1e3 * divided_s:.2f} ms divided"
    assert ranks.sent == [[is_divided]]
    assert len(ranks.facts) == 1  # the ranks compare their heads


def test_ranks_compare_the_files_of_their_heads_and_the_draft_vocabulary(tmp_path: Path) -> None:
    names = []
    for data, ids in ((b"one", None), (b"two", None), (b"one", mx.array([1, 2])), (b"one", None)):
        (tmp_path / "head.safetensors").write_bytes(data)
        ranks: Any = Rank0()
        own = SimpleNamespace(is_divided=True, spec="s", draft_ids=ids, weight_files=[tmp_path])
        choose(HeadCandidates(None, own), TRUNK, "divided", ranks)  # type: ignore[arg-type]
        names += ranks.facts.values()
    assert names[0] == names[3]
    assert len({*names}) == 3


def test_an_option_decides_without_a_measurement() -> None:
    ranks: Any = Rank0()
    assert chosen(HeadCandidates(WHOLE), "whole", ranks) == (
        ChosenHead(WHOLE, "--rank-head whole"),
        "--rank-head whole",
    )
    assert chosen(HeadCandidates(None, DIVIDED), "divided", ranks)[0].head is DIVIDED


def test_a_head_that_cannot_be_divided_is_whole_or_refused() -> None:
    ranks: Any = Rank0(can_divide=False)
    candidates = HeadCandidates(WHOLE, None, "it cannot")
    found, reason = chosen(candidates, "auto", ranks)
    assert (found.head, found.rank_head, reason) == (WHOLE, "whole", "it cannot")
    with pytest.raises(InvalidConfig, match=r"--rank-head divided: it cannot\. Use --rank-head whole"):
        choose(candidates, TRUNK, "divided", ranks)
    found, reason = chosen(HeadCandidates(WHOLE, DIVIDED), "auto", ranks)
    assert found.head is WHOLE
    assert "another rank cannot load its part" in reason


def test_without_a_head_nothing_is_said() -> None:
    ranks: Any = Rank0()
    assert choose(HeadCandidates(), TRUNK, "auto", ranks) == ChosenHead(None)
    assert ChosenHead(None).rank_head is None


def test_one_rank_takes_no_choice() -> None:
    loaded: Any = None
    source = HeadSource(None, None, "auto", "none")
    assert load_candidates(loaded, source, "auto", None) == HeadCandidates()
    with pytest.raises(InvalidConfig, match="--rank-head"):
        config_for_ranks(EngineConfig(rank_head="divided"), 0, None)
    with pytest.raises(InvalidConfig, match="rank_head must be one of auto, whole, divided"):
        EngineConfig(rank_head="half")  # type: ignore[arg-type]
