"""The MTP head of an engine: where it is looked for, and whether several ranks divide it.

A whole head is on rank 0, which drafts alone. With a divided head each rank reads a part of the weights, and
every draft needs messages. Which is cheaper depends on the link between the ranks and on the bytes of the
head. So rank_head="auto" times drafts of both heads when the ranks start.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from outrider.config import InvalidConfig, RankHead
from outrider.models import heads, loader
from outrider.models.files.shipped_head import shipped_head
from outrider.models.files.weights_digest import files_digest
from outrider.models.trunk import Trunk
from outrider.step import head_timing
from outrider.step.ranks import Ranks

log = logging.getLogger(__name__)

WORTH_DIVIDING = 0.95  # of the time of a whole head, that a divided one may take at most; chosen by hand


@dataclass(frozen=True)
class HeadSource:
    """Which head to load, and how."""

    head: str | Path | None  # None: a head beside the model or in its checkpoint, if there is one
    draft_vocabulary: int | None
    dtype: str
    drafter: str  # of the EngineConfig


@dataclass(frozen=True)
class HeadCandidates:
    """The heads that this process may draft with."""

    whole: heads.LoadedHead | None = None
    divided: heads.LoadedHead | None = None  # this rank's part
    reason: str | None = None  # why this rank has no part of the head

    def prepare_for_serving(self, trunk: Trunk) -> None:
        for head in (self.whole, self.divided):
            if head is not None:
                head.prepare_for_serving(trunk)


@dataclass(frozen=True)
class ChosenHead:
    """The head that this process drafts with, or takes part in."""

    head: heads.LoadedHead | None
    reason: str | None = None  # why it is whole or divided

    @property
    def is_divided(self) -> bool:
        return self.head is not None and self.head.is_divided

    @property
    def rank_head(self) -> str | None:
        """Whole or divided; None: there are no other ranks, or no head."""
        return None if self.reason is None else "divided" if self.is_divided else "whole"


def load_candidates(
    loaded: loader.LoadedModel, source: HeadSource, rank_head: RankHead, ranks: Ranks | None
) -> HeadCandidates:
    """`rank_head`: of the EngineConfig. Raises HeadError or InvalidConfig if a head is asked for in vain."""
    if ranks is None:
        return HeadCandidates(load_head(loaded, source))
    ranks.check_same({"--rank-head": rank_head})
    whole = None
    if ranks.rank == 0 and rank_head != "divided":
        whole = load_head(loaded, source)
        if whole is None:
            return HeadCandidates()
    if rank_head == "whole":
        return HeadCandidates(whole)
    try:
        divided = load_head(loaded, source, ranks)
    except (heads.HeadError, InvalidConfig) as error:
        return HeadCandidates(whole, reason=str(error))
    reason = None if divided is not None else f"{loaded.path} has no MTP head (drafter: {source.drafter})"
    return HeadCandidates(whole, divided, reason)


def choose(candidates: HeadCandidates, trunk: Trunk, rank_head: RankHead, ranks: Ranks | None) -> ChosenHead:
    """All ranks call it. Raises InvalidConfig if a head that has to be divided cannot be."""
    if ranks is None:
        return ChosenHead(candidates.whole)
    chosen = _choose(candidates, trunk, rank_head, ranks)
    if ranks.rank == 0 and chosen.reason is not None:
        log.info("the MTP head is %s (%s)", chosen.rank_head, chosen.reason)
    return chosen


def _choose(candidates: HeadCandidates, trunk: Trunk, rank_head: RankHead, ranks: Ranks) -> ChosenHead:
    has_whole, can_divide = ranks.count([candidates.whole is not None, candidates.divided is not None])
    if not has_whole and rank_head != "divided":  # of rank 0
        return ChosenHead(None)
    if rank_head == "whole":
        return ChosenHead(candidates.whole, "--rank-head whole")
    if can_divide < ranks.size:
        return _undivided(candidates, rank_head, ranks)
    assert candidates.divided is not None
    ranks.check_same({"MTP head (or use --rank-head whole)": _digest(candidates.divided)})
    if rank_head == "divided":
        return ChosenHead(candidates.divided, "--rank-head divided")
    return _cheaper(candidates.whole, candidates.divided, trunk, ranks)


def _undivided(candidates: HeadCandidates, rank_head: RankHead, ranks: Ranks) -> ChosenHead:
    if candidates.reason is not None:
        log.warning("rank %d: %s", ranks.rank, candidates.reason)
    reason = candidates.reason or "another rank cannot load its part: see its log"
    if rank_head == "divided":
        raise InvalidConfig(f"--rank-head divided: {reason.rstrip('.')}. Use --rank-head whole.")
    return ChosenHead(candidates.whole, reason)


def _cheaper(
    whole: heads.LoadedHead | None, divided: heads.LoadedHead, trunk: Trunk, ranks: Ranks
) -> ChosenHead:
    """The head whose drafts take less time. Rank 0 decides."""
    whole_s, divided_s = head_timing.shortest_s(whole, divided, trunk, ranks)
    is_divided = divided_s < WORTH_DIVIDING * whole_s
    if ranks.rank == 0:
        ranks.send([is_divided])
    else:
        is_divided = bool(ranks.receive()[0])
    reason = f"measured: a draft takes {1e3 * whole_s:.2f} ms whole, {1e3 * divided_s:.2f} ms divided"
    return ChosenHead(divided if is_divided else whole, reason)


def _digest(head: heads.LoadedHead) -> str:
    """The same for ranks whose parts are of one head."""
    (source,) = head.weight_files
    files = [source] if source.is_file() else sorted(source.glob("*.safetensors"))
    ids = b"" if head.draft_ids is None else np.array(head.draft_ids).tobytes()
    return f"{files_digest(files)} {head.spec} {hashlib.sha256(ids).hexdigest()}"


def load_head(
    loaded: loader.LoadedModel, wanted: HeadSource, ranks: Ranks | None = None
) -> heads.LoadedHead | None:
    """The head that the user names, or one beside the model, in its checkpoint, or shipped with Outrider.

    `ranks`: this rank's part of it.
    """
    if wanted.drafter in ("ngram", "none"):
        return None
    source: Path | heads.HeadFiles | None
    group = None if ranks is None else ranks.group
    try:
        if wanted.head is not None:
            source = Path(wanted.head)
        else:
            source = heads.locate(loaded.path) or shipped_head(loaded.path)
        if source is not None:
            how = wanted.draft_vocabulary, loaded.config, wanted.dtype, group
            return heads.load_head(source, loaded.trunk, *how)
    except heads.HeadNotDivisible:
        raise
    except heads.HeadError as error:  # the head is unknown, incomplete or damaged
        if wanted.head is not None or wanted.drafter == "mtp" or ranks is not None:
            raise
        log.warning("%s Answering without drafts: %s.", error, _ways_to_a_head(loaded))
        return None
    if wanted.drafter == "mtp":
        raise InvalidConfig(_no_head(loaded))
    if heads.expected(loaded.config) and group is None:
        log.warning("%s Answering without drafts.", _no_head(loaded))
    return None


def _ways_to_a_head(loaded: loader.LoadedModel) -> str:
    path = loaded.path
    return (
        f"take a head out of the original checkpoint (outrider mtp extract ORIGINAL --into {path}), or "
        f"train one (outrider mtp train {path})"
    )


def _no_head(loaded: loader.LoadedModel) -> str:
    train = f"train one (outrider mtp train {loaded.path})"
    drafter = heads.separate_drafter(loaded.path)
    if drafter is not None:
        return f"{loaded.path} has no MTP head. {drafter} is one: pass --head {drafter} (head= in Python)."
    if heads.expected(loaded.config):
        return (
            f"{loaded.path} was converted without its MTP head. Take it out of the original "
            f"(outrider mtp extract ORIGINAL --into {loaded.path}), or {train}."
        )
    return (
        'drafter="mtp" needs an MTP head, and there is none beside this model or in its checkpoint: '
        f"{train}, "
        'pass head=FILE, or use drafter="ngram" or "auto".'
    )
