"""Pictures, cached prefixes, resting heads, preemptions, failures and cancels in one history; no model."""

from __future__ import annotations

import random

import numpy as np
import pytest
from fake_runner import VOCAB_SIZE
from scheduler_harness import Harness, rows_of
from test_scheduler_images import FakeEmbeddings, watched_step

from outrider.engine.row_caches import SLACK
from outrider.engine.sequence import Sequence
from outrider.plan import CacheGeometry
from outrider.prompt_media import MediaPiece, PromptMedia
from outrider.speculate.ngram import NgramDrafter
from patience import in_test_or_soak
from restless_controller import RestlessController

NUM_HISTORIES = in_test_or_soak(24, 80)
BAD_PICTURE = "not a picture"


class History:
    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(f"everything {seed}")
        geometry = CacheGeometry(1, rng.choice((0, 0, 100)), rng.choice((1, 4, 16)))
        alone = geometry.num_bytes(1, geometry.capacity_for(rng.choice((60, 120, 280)) + SLACK))
        self.image_embeddings = FakeEmbeddings()
        self.harness = Harness(
            max_rows=rng.randint(1, 6),
            prefill_step_size=rng.choice((1, 5, 16, 64)),
            geometry=geometry,
            budget_bytes=int(alone * rng.choice((1, 1.2, 1.5, 2, 10))),
            seed=seed,
            controller=RestlessController(seed) if rng.random() < 0.8 else None,
            prefix_bytes=rng.choice((0, 50, 1000, 10**6, 10**6)),
            block_size=rng.choice((2, 4, 8, 32)),
            min_loaded_cells=rng.choice((1, 1, 5)),
            image_embeddings=self.image_embeddings,
            ahead=seed % 3 / 2,
        )
        self.num_caught_up = 0

    def run(self) -> None:
        for _ in range(self.rng.choice((30, 100))):
            self._happen()
            self._look_at_pictures()
        while not self.harness.scheduler.is_idle:
            self._step()
            self._look_at_pictures()
        self.harness.run_to_idle()
        assert not +self.image_embeddings.held
        for sequence in self.harness.sequences:
            assert self.harness.answer(sequence).error in (None, BAD_PICTURE)

    def _happen(self) -> None:
        harness, rng, what = self.harness, self.rng, self.rng.random()
        somebody = harness.live[rng.choice(sorted(harness.live))] if harness.live else None
        if what < 0.2:
            self._add()
        elif what < 0.23 and somebody is not None:
            harness.cancel(somebody)
        elif what < 0.24 and harness.prefix is not None:
            harness.prefix.clear()
        elif what < 0.26 and not any(row.failures for row in harness.live.values()):
            harness.runner.raises_next = True
            self._step()
            harness.runner.raises_next = False
        else:
            self._step()

    def _step(self) -> None:
        plan = watched_step(self.harness, self.image_embeddings)
        self.num_caught_up += sum(row.feeds_head and row.head_lag > 0 for row in rows_of(plan))

    def _look_at_pictures(self) -> None:
        """As the engine does between steps: one piece is encoded, or not yet, or never."""
        piece = self.harness.scheduler.next_piece()
        if piece is not None and self.rng.random() < 0.02:
            self.harness.take(*self.harness.scheduler.fail_piece(piece, BAD_PICTURE))
        elif piece is not None and self.rng.random() < 0.6:
            self.image_embeddings.keys.add(piece.key)
        if self.rng.random() < 0.2:
            self.image_embeddings.forget_some(self.rng)

    def _add(self) -> None:
        """Often what an earlier request said, its answer included or not, and something more."""
        rng, room = self.rng, self.harness.scheduler.longest_context() - 1
        ids: list[int] = []
        pieces: list[MediaPiece] = []
        if self.harness.sequences and rng.random() < 0.75:
            ids, pieces = self._beginning(rng.choice(self.harness.sequences))
        for _ in range(rng.choice((1, 1, 2, 3))):
            if rng.random() < 0.3:
                picture = rng.randrange(6)
                cells = np.arange(len(ids), len(ids) + 2 + picture, dtype=np.int32)
                pieces.append(MediaPiece(f"p{picture}", {}, cells))
                ids += [picture] * len(cells)
            ids += [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice((1, 2, 10, 30, 60)))]
        if len(ids) > room:
            return
        media = PromptMedia(tuple(pieces)) if pieces else None
        depth = rng.randint(0, 8)
        self.harness.add(
            ids,
            max_tokens=min(rng.choice((1, 2, 10, 40, 80)), room + 1 - len(ids)),
            depth=depth,
            head_depth=rng.choice((depth, depth, 0)),
            drafter=NgramDrafter() if rng.random() < 0.3 else None,
            is_auto=rng.random() < 0.7,
            stop_ids=rng.choice(((), (), (), (3,))),
            stop_token=rng.choice((None, None, None, 5)),
            salt=rng.choice(("", "", "", "other")),
            keys=None if media is None else media.distinct_ids(ids),
            media=media,
        )

    def _beginning(self, earlier: Sequence) -> tuple[list[int], list[MediaPiece]]:
        """All it has said so far, or a part that cuts no picture."""
        end = self.rng.choice((len(earlier.tokens), self.rng.randint(0, len(earlier.tokens))))
        pieces = () if earlier.request.media is None else earlier.request.media.pieces
        end = min([end, *(piece.first for piece in pieces if piece.first < end <= piece.cells[-1])])
        return earlier.tokens[:end], [piece for piece in pieces if piece.first < end]


@pytest.mark.soak
@pytest.mark.parametrize("most_copied", [8, 32, 256 << 20])
def test_every_request_gets_its_true_tokens(most_copied: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.engine.prefix.cache.MAX_COPIED_BYTES", most_copied)
    num_loaded = num_caught_up = preemptions = 0
    for seed in range(10, 10 + NUM_HISTORIES):  # the first ten have no preemption
        history = History(seed)
        try:
            history.run()
        except Exception as error:
            error.add_note(f"the history of seed {seed}")
            raise
        num_loaded += history.harness.runner.num_loaded
        num_caught_up += history.num_caught_up
        preemptions += sum(sequence.counters.preemptions for sequence in history.harness.sequences)
    assert num_loaded > in_test_or_soak(300, 1000)
    assert num_caught_up > in_test_or_soak(30, 100)
    assert preemptions > 0
