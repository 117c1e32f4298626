"""Media rows in the scheduler: nothing is read before it is encoded, nobody waits for ever."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable

import numpy as np
import pytest
from scheduler_harness import Harness, rows_of

from outrider.engine.in_flight import InFlightStep
from outrider.plan import CacheGeometry, StepPlan
from outrider.prompt_media import MediaPiece, PromptMedia


class FakeEmbeddings:
    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.held: Counter[str] = Counter()

    def __contains__(self, key: object) -> bool:
        return key in self.keys

    def hold(self, keys: Iterable[str]) -> None:
        self.held.update(keys)

    def release(self, keys: Iterable[str]) -> None:
        self.held.subtract(keys)
        assert min(self.held.values()) >= 0

    def forget_holds(self) -> None:
        self.held.clear()

    def forget_some(self, rng: random.Random) -> None:
        """What a small cache does between requests: only what is not held goes."""
        self.keys -= {key for key in self.keys if not self.held[key] and rng.random() < 0.5}


def media_of(rng: random.Random, length: int) -> PromptMedia:
    """One to three pieces, with or without text between them, of a few known pictures."""
    cells = sorted(rng.sample(range(1, length), rng.randint(1, min(12, length - 1))))
    cuts = sorted(rng.sample(range(1, len(cells)), min(len(cells) - 1, rng.randint(0, 2))))
    groups = np.split(np.array(cells, np.int32), cuts)
    return PromptMedia(tuple(MediaPiece(f"p{rng.randint(0, 9)}", {}, group) for group in groups))


def check_rows(harness: Harness, image_embeddings: FakeEmbeddings, plan: StepPlan | None) -> None:
    for row in rows_of(plan):
        sequence = harness.live[row.sequence_id]
        media = sequence.request.media
        assert row.has_images == (media is not None), "its mark stays while it decodes"
        if media is None or sequence.is_decoding:
            assert row.media is None
            continue
        assert row.media is media
        for piece in media.within(row.start, row.start + row.num_fed + 1):  # the head reads one ahead
            assert piece.key in image_embeddings, "read before it was encoded"
            assert image_embeddings.held[piece.key] > 0, "read without being held"


def watched_step(harness: Harness, image_embeddings: FakeEmbeddings) -> StepPlan | None:
    plan_step = harness.scheduler.plan

    def watched() -> InFlightStep | None:
        step = plan_step()
        check_rows(harness, image_embeddings, None if step is None else step.plan)
        return step

    harness.scheduler.plan = watched  # type: ignore[method-assign]
    try:
        return harness.step()
    finally:
        harness.scheduler.plan = plan_step  # type: ignore[method-assign]


@pytest.mark.parametrize("seed", range(60))
def test_any_history_ends_well(seed: int) -> None:
    rng = random.Random(seed)
    image_embeddings = FakeEmbeddings()
    harness = Harness(
        max_rows=rng.randint(1, 4),
        prefill_step_size=rng.choice([3, 8, 32]),
        geometry=CacheGeometry(bytes_per_cell=1, capacity_step=16),
        budget_bytes=rng.choice([150, 400, 10**6]),
        seed=seed,
        image_embeddings=image_embeddings,
    )
    to_come = 14
    for _ in range(3000):
        if to_come and rng.random() < 0.3:
            to_come -= 1
            length = rng.randint(2, 40)
            media = media_of(rng, length) if rng.random() < 0.6 else None
            harness.add(length, max_tokens=rng.randint(1, 12), depth=rng.randint(0, 3), media=media)
        if harness.live and rng.random() < 0.02:
            harness.cancel(rng.choice(list(harness.live.values())))
        if rng.random() < 0.02:
            harness.runner.raises_next = True
        plan = watched_step(harness, image_embeddings)
        piece = harness.scheduler.next_piece()
        if piece is not None and (plan is None or not plan.batches or rng.random() < 0.4):
            if rng.random() < 0.03:
                harness.take(*harness.scheduler.fail_piece(piece, "it cannot be encoded"))
            else:
                image_embeddings.keys.add(piece.key)
        image_embeddings.forget_some(rng)
        if not to_come and not harness.live:
            break
    assert not harness.live
    assert not to_come
    assert sum(image_embeddings.held.values()) == 0
    harness.run_to_idle()


def test_text_before_a_picture_is_read_while_the_picture_is_encoded() -> None:
    image_embeddings = FakeEmbeddings()
    harness = Harness(image_embeddings=image_embeddings)
    media = PromptMedia((MediaPiece("p", {}, np.arange(10, 14, dtype=np.int32)),))
    row = harness.add(20, media=media)
    harness.step()
    assert row.num_cached == 9  # the cell before the picture waits with it: the head reads one ahead
    plan = harness.step()
    assert plan is None or not plan.batches
    assert harness.scheduler.next_piece() is media.pieces[0]
    image_embeddings.keys.add("p")
    harness.step()
    assert row.is_decoding
    assert sum(image_embeddings.held.values()) == 0
    harness.run_to_idle()


def test_rows_keep_their_cells_while_all_of_them_wait() -> None:
    """A row that leaves makes the others move, also in a step in which nobody runs."""
    image_embeddings = FakeEmbeddings()
    harness = Harness(image_embeddings=image_embeddings)
    media = [PromptMedia((MediaPiece(f"p{i}", {}, np.array([6], np.int32)),)) for i in range(3)]
    rows = [harness.add(12, media=one, depth=2) for one in media]
    harness.step()
    assert [row.num_cached for row in rows] == [5, 5, 5]
    harness.cancel(rows[0])
    for _ in range(3):
        harness.step()
    image_embeddings.keys.update(("p1", "p2"))
    harness.run_to_idle()
    assert all(harness.answer(row).finish_reason == "length" for row in rows[1:])
