"""Random histories with everything at once: pictures, videos, cached prefixes, resting heads, preemptions.

Conversations go on from earlier ones, answers included, or fork off; pictures come back. Every answer is
compared with that of the same request alone: without drafts, cached prefixes or chunks.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from image_files import noise
from media_world import new_world
from outrider.cache.prefix_index import PrefixIndex
from outrider.config import EngineConfig
from outrider.engine import sequence as engine_sequence
from outrider.engine.draft_state import DraftState
from outrider.engine.in_flight import InFlightStep
from outrider.engine.prefix.cache import PrefixCache
from outrider.engine.row_caches import SLACK
from outrider.engine.scheduler import Scheduler
from outrider.engine.sequence import Delta
from outrider.media.frames import DecodedVideo, VideoHeader
from outrider.media.image_reader import ProcessedImage, VideoReader
from outrider.media.images import image_from_pixels
from outrider.models.heads import HeadSpec, LoadedHead
from outrider.models.loader import load
from outrider.plan import NUM_SPARE_BLOCKS, StepPlan
from outrider.prompt_media import PromptMedia
from outrider.request import Request, SamplingParams
from outrider.step.runner import Runner
from restless_controller import RestlessController
from run_steps import run_step
from step.histories import _NoText, random_head
from tiny_models import SPECIAL_TOKENS
from video_files import clip

SIZES = ((16, 16), (40, 24), (20, 36), (40, 40))
VIDEO_SIZES = ((16, 16), (32, 24))
FIRST_WORD = 40  # ids from here on are text
BANNED = dict.fromkeys(range(len(SPECIAL_TOKENS), FIRST_WORD), -np.inf)  # an answer holds no image tokens
LONGEST, MOST_TOKENS = 150, 60  # of a prompt, of an answer
HEAD_LAYERS = (0, 1, 1, 3)
MADE_TO_FAIL = "made to fail"


@dataclass(frozen=True)
class Talk:
    """A prompt and its pictures, in order."""

    ids: tuple[int, ...]
    pictures: tuple[int, ...]


@dataclass
class MediaTally:
    finished: Counter[str] = field(default_factory=Counter)
    hit_cells: int = 0
    hits_in_a_picture: int = 0
    preemptions: int = 0
    caught_up: int = 0
    accepted: int = 0
    encoded: int = 0
    failed_steps: int = 0

    def add(self, other: MediaTally) -> None:
        self.finished += other.finished
        self.hit_cells += other.hit_cells
        self.hits_in_a_picture += other.hits_in_a_picture
        self.preemptions += other.preemptions
        self.caught_up += other.caught_up
        self.accepted += other.accepted
        self.encoded += other.encoded
        self.failed_steps += other.failed_steps


def read_video(videos: VideoReader, frames: np.ndarray) -> ProcessedImage:
    """All frames, two a second."""
    header = VideoHeader(len(frames), 2.0, frames.shape[2], frames.shape[1])
    return videos.read(DecodedVideo(header, tuple(range(len(frames))), frames))


class MediaWorld:
    """One tiny vision model, heads of one and three layers, pictures and videos, and what is said alone."""

    def __init__(self, folder: Path, name: str) -> None:
        world = new_world(folder, name)
        loaded = load(folder)
        assert loaded.vision is not None
        self.trunk, self.vocab_size = loaded.trunk, loaded.trunk.vocab_size
        self._reader, self._vision_encoder = loaded.vision.reader, loaded.vision.encoder
        self._read: list[ProcessedImage] = []
        self.shown: list[tuple[int, ...]] = []  # the ids that stand for each picture
        for number, size in enumerate(SIZES):
            pixels = noise(*size, number)
            ids = world.inputs(("", ""), [pixels])["input_ids"][0].tolist()
            self.shown.append(tuple(ids[1:-2]))  # without the roles
            self._read.append(self._reader.read(image_from_pixels(pixels)))
        for number, size in enumerate(VIDEO_SIZES if self._reader.videos is not None else ()):
            video = read_video(self._reader.videos, clip(5, *size, seed=number))
            text = f"<|vision_start|>{video.text}<|vision_end|>"
            self.shown.append(tuple(loaded.tokenizer.encode(text, add_special_tokens=False)))
            self._read.append(video)
        self._alone = self.runner(0)
        self._answers: dict[tuple[Talk, str], list[int]] = {}

    def runner(self, num_layers: int, picture_bytes: int = 1 << 30, block_size: int | None = None) -> Runner:
        layers = tuple(random_head(self.trunk, HeadSpec(is_chained=True)) for _ in range(num_layers))
        head = LoadedHead(layers, "random") if layers else None
        return Runner(self.trunk, head, None, self._vision_encoder, picture_bytes, block_size=block_size)

    def media(self, talk: Talk) -> PromptMedia | None:
        if not talk.pictures:
            return None
        return self._reader.place(talk.ids, [self._read[number] for number in talk.pictures])

    def answer(self, talk: Talk, params: SamplingParams) -> list[int]:
        asked = (talk, repr(params))
        if asked not in self._answers:
            geometry = self._alone.geometry(256)
            scheduler = Scheduler(
                EngineConfig(max_rows=1), geometry, 1 << 40, image_embeddings=self._alone.image_embeddings
            )
            row = new_row(0, talk, params, self.media(talk))
            scheduler.add(row)
            while not scheduler.is_idle:
                while (piece := scheduler.next_piece()) is not None:
                    self._alone.encode(piece)
                step = scheduler.plan()
                if step is not None:
                    run_step(scheduler, self._alone, step)
            self._alone.reset()
            self._answers[asked] = row.tokens[len(talk.ids) :]
        return self._answers[asked]


def new_row(
    number: int,
    talk: Talk,
    params: SamplingParams,
    media: PromptMedia | None,
    depth: int = 0,
    head_layers: int = 0,
    is_auto: bool = False,
) -> engine_sequence.Sequence:
    keys = None if media is None else tuple(media.distinct_ids(talk.ids))
    assert params.max_tokens is not None
    return engine_sequence.Sequence(
        id=number,
        request=Request(str(number), talk.ids, params, media=media, prompt_keys=keys),
        text=_NoText(),
        stop_ids=frozenset(params.stop_token_ids),
        max_tokens=params.max_tokens,
        drafting=DraftState(
            max_depth=depth if head_layers else 0,
            head_depth=depth if head_layers else 0,
            head_layers=max(1, head_layers),
            is_auto=is_auto,
        ),
    )


class MediaHistory:
    """A server's life: requests that come and go, one prefix cache, one cache of image embeddings."""

    def __init__(self, world: MediaWorld, seed: int, num_steps: int = 45) -> None:
        self._world = world
        self._rng = rng = random.Random(f"media {seed}")
        self._num_steps = num_steps
        self._fails = (0, 0.03)[seed % 2]  # steps, so many of them
        self._head_layers = rng.choice(HEAD_LAYERS)
        block_size = rng.choice((4, 8, 16))
        self._runner = world.runner(
            self._head_layers, rng.choice((1, 1, 1 << 14, 1 << 30)), block_size if seed % 3 else None
        )
        geometry = self._runner.geometry(rng.choice((16, 64)))
        per_cell, per_state = geometry.bytes_per_cell, geometry.bytes_per_slot
        num_blocks = rng.choice((1.5, 12, 500, 500))
        index = PrefixIndex(
            int((block_size * per_cell + per_state) * num_blocks), per_cell, per_state, block_size
        )
        self._cache = PrefixCache(
            index, per_cell, has_states=per_state > 0, min_loaded_cells=rng.choice((1, 5))
        )
        longest = LONGEST + MOST_TOKENS + SLACK
        alone = geometry.num_bytes(1, geometry.capacity_for(longest))
        if geometry.has_blocks:
            alone = geometry.num_bytes_in_blocks(1, NUM_SPARE_BLOCKS + geometry.blocks_for(longest))
        budget = int(alone * (1.2, 9, 1.5, 1)[seed % 4])
        config = EngineConfig(max_rows=rng.choice((1, 4, 6)), prefill_step_size=rng.choice((3, 16, 40)))
        self._scheduler = Scheduler(
            config, geometry, budget, RestlessController(seed), self._cache, self._runner.image_embeddings
        )
        self._rows: list[tuple[engine_sequence.Sequence, Talk]] = []
        self._found: dict[str, list[int]] = {}
        self._ends: dict[str, str] = {}
        self.tally = MediaTally()

    def run(self) -> MediaTally:
        for _ in range(self._num_steps):
            self._come_and_go()
            self._turn()
        while not self._scheduler.is_idle:
            self._turn()
        if (last := self._scheduler.plan()) is not None:
            run_step(self._scheduler, self._runner, last)
        self._runner.reset()
        assert self._runner.prefix_bytes == self._scheduler.prefix_bytes
        assert self._runner.num_bytes == self._scheduler.num_bytes == 0
        assert self._runner.image_embeddings is not None
        assert self._runner.image_embeddings.num_held == 0
        for row, talk in self._rows:
            self._check(row, talk)
        self.tally.hit_cells = self._cache.num_hit_cells
        return self.tally

    # -- clients -----------------------------------------------------------------------------------------

    def _come_and_go(self) -> None:
        if self._rng.random() < 0.25:
            self._join()
        live = [row for row, _ in self._rows if row.request.id not in self._ends]
        if live and self._rng.random() < 0.03:
            self._take(self._scheduler.cancel(self._rng.choice(live)))
        if self._rng.random() < 0.01:
            self._cache.clear()

    def _join(self) -> None:
        rng, talk = self._rng, self._talk()
        params = SamplingParams(
            max_tokens=rng.choice((1, 20, MOST_TOKENS, MOST_TOKENS)),
            temperature=rng.choice((0, 0, 0.8)),
            seed=rng.randrange(3),
            logit_bias=BANNED,
            cache_salt=rng.choice(("", "", "", "other")),
            stop_token_ids=rng.choice(((), (), (50, 60, 70, 80))),
        )
        depth, is_auto, number = rng.randint(0, 8), rng.random() < 0.8, len(self._rows)
        row = new_row(number, talk, params, self._world.media(talk), depth, self._head_layers, is_auto)
        self._rows.append((row, talk))
        self._found[row.request.id] = []
        self._scheduler.add(row)

    def _talk(self) -> Talk:
        """Something new, or what was said before, answer included, or its beginning; and more words."""
        rng, said = self._rng, Talk((), ())
        if self._rows and rng.random() < 0.75:
            row, talk = rng.choice(self._rows)
            said = Talk(tuple(row.tokens), talk.pictures)
            if rng.random() < 0.3:
                said = self._cut(said)
        for _ in range(rng.choice((1, 1, 2))):
            if rng.random() < 0.6:
                number = rng.randrange(len(self._world.shown))
                said = Talk((*said.ids, *self._world.shown[number]), (*said.pictures, number))
            said = Talk((*said.ids, *self._words(rng.choice((1, 3, 20)))), said.pictures)
        return said if len(said.ids) <= LONGEST else Talk(tuple(self._words(9)), ())

    def _cut(self, said: Talk) -> Talk:
        """A beginning of it that cuts no picture."""
        end = self._rng.randint(1, len(said.ids))
        pictures: list[int] = []
        place = 0
        for number in said.pictures:
            shown = self._world.shown[number]
            place = _find(said.ids, shown, place)
            if place < end < place + len(shown):
                end = place
            if place >= end:
                break
            pictures.append(number)
            place += len(shown)
        return Talk(said.ids[:end], tuple(pictures))

    def _words(self, num: int) -> list[int]:
        return [self._rng.randrange(FIRST_WORD, self._world.vocab_size) for _ in range(num)]

    # -- the engine --------------------------------------------------------------------------------------

    def _turn(self) -> None:
        step = self._scheduler.plan()
        if step is not None:
            self._step(step)
        elif self._scheduler.is_idle:
            self._runner.reset()
        self._scheduler.check_integrity()
        assert self._runner.num_bytes == self._scheduler.num_bytes
        piece = self._scheduler.next_piece()
        if piece is None:
            assert step is not None or self._scheduler.is_idle, "nothing to do where somebody waits"
        elif self._rng.random() < 0.02:
            self._take(*self._scheduler.fail_piece(piece, MADE_TO_FAIL))
        elif step is None or not step.plan.batches or self._rng.random() < 0.5:
            self._runner.encode(piece)
            self.tally.encoded += 1

    def _step(self, step: InFlightStep) -> None:
        self._note(step.plan)
        is_trial = any(row.failures for row, _ in self._rows if row.slot is not None)
        if not is_trial and self._rng.random() < self._fails:
            self.tally.failed_steps += 1
            if self._rng.random() < 0.5:
                self._runner.run(step.plan)
            self._runner.reset()
            self._runner.clear_prefixes()
            self._take(*self._scheduler.fail(MADE_TO_FAIL))
        else:
            self._take(*run_step(self._scheduler, self._runner, step))

    def _note(self, plan: StepPlan) -> None:
        rows = [row for batch in plan.batches for row in batch]
        self.tally.caught_up += sum(row.feeds_head and row.head_lag > 0 for row in rows)
        ends = {load.slot: load.start + load.num_cells for load in plan.copies.loads}
        for row, _ in self._rows:
            if row.slot in ends and row.request.media is not None:
                end = ends[row.slot]
                self.tally.hits_in_a_picture += bool(
                    [p for p in row.request.media.pieces if p.first < end <= p.cells[-1]]
                )

    def _take(self, *deltas: Delta) -> None:
        for delta in deltas:
            assert delta.request_id not in self._ends, "something came after the end"
            assert delta.error in (None, MADE_TO_FAIL), delta.error
            self._found[delta.request_id] += delta.token_ids
            if delta.finish_reason is not None:
                self._ends[delta.request_id] = delta.finish_reason
                self.tally.finished[delta.finish_reason] += 1

    def _check(self, row: engine_sequence.Sequence, talk: Talk) -> None:
        found, reason = self._found[row.request.id], self._ends[row.request.id]
        assert found == row.tokens[len(talk.ids) :], "deltas and tokens differ"
        expected = self._world.answer(talk, row.params)
        if reason in ("cancelled", "error"):
            expected = expected[: len(found)]
        assert found == expected, f"row {row.id}, {reason}, {talk}: {found} where alone it gives {expected}"
        self.tally.preemptions += row.counters.preemptions
        self.tally.accepted += sum(row.counters.accepted)


def _find(ids: Sequence[int], part: Sequence[int], start: int) -> int:
    return next(i for i in range(start, len(ids)) if tuple(ids[i : i + len(part)]) == tuple(part))
