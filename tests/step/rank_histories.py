"""One rank of a tiny model that plays random histories.

    python rank_histories.py NAME BLOCK_SIZE SEED NUM OUT [FAULT]

Rank 0 plays NUM histories from SEED on, and a session with a prefix cache in memory and on disk, and writes
its counts to OUT. The other ranks follow it. BLOCK_SIZE 0: rows keep their cells by slots. FAULT: what the
other ranks do wrong, to see that it is noticed. " adapted" behind NAME: the requests of the histories name
adapters, of which each rank has its part. " divided" behind NAME: the head is divided among the ranks;
" divided reduced": it has a reduced vocabulary. Then each history is played with the whole head too, and the
two heads have to draft the same tokens, near ties counted.

In float32 an answer is compared with mlx-lm's own model in one process, near ties excused. A quantised model
rounds, which magnifies a difference in the last bit, so its answers are compared twice:

    with the same ranks    the request alone, without drafts: the same tokens, no excuse
    with one rank          near ties excused, and counted. Not mixtures of experts: at a near tie of a router
                           another expert answers
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from outrider.cache.block_folder import BlockFolder
from outrider.cache.disk_tier import DiskTier
from outrider.cache.ragged_kv import RaggedKV
from outrider.cpu import fused_layers
from outrider.cpu.quantized import is_kept, quantized_layers
from outrider.models.adapters.files import AdapterFiles
from outrider.models.divided_output import DividedOutput
from outrider.models.dtypes import settle_dtype
from outrider.models.heads import LoadedHead, divide
from outrider.models.sharding import shard
from outrider.models.trunk import Trunk
from outrider.plan import AdapterInfo, StepResult
from outrider.request import SamplingParams
from outrider.step import step_message
from outrider.step.batch import InputBatch
from outrider.step.deferred_head import DeferredHeadInputs
from outrider.step.follower import follow
from outrider.step.rank_disk import FirstRankDisk, FollowerDisk
from outrider.step.ranks import Ranks
from outrider.step.runner import LaunchedPasses, Runner
from step.histories import (
    Ask,
    Divergence,
    HeadSize,
    History,
    Tally,
    World,
    _family,
    _first_difference,
    _Live,
    _model,
    _Player,
    play,
    random_head,
    random_history,
    some_ids,
    stored_model,
)
from step.prefix_sessions import Session
from step.reference import Answer, solo_answer
from step.test_adapter_histories import (
    ADAPTERS,
    AdaptedWorld,
    adapted_history,
    load_all,
    written_adapters,
)
from tiny_models import is_quantized_name

SIZES = {  # that two and three ranks divide, into groups of 32 where weights are quantised
    "llama": {
        "num_attention_heads": 12,
        "num_key_value_heads": 6,
        "intermediate_size": 192,
        "tie_word_embeddings": True,
    },
    "qwen3_moe": {
        "num_attention_heads": 12,
        "num_key_value_heads": 6,
        "intermediate_size": 192,
        "moe_intermediate_size": 192,
    },
    "qwen3_5": {
        "num_attention_heads": 12,
        "num_key_value_heads": 6,
        "intermediate_size": 192,
        "linear_num_key_heads": 6,
        "linear_num_value_heads": 12,
    },
}
FUSED = ("llama", "qwen3_moe")  # families whose quantised layers are fused
# Quantised models against one rank: a sum in another order changes a code of 15 bits now and then. That
# changed the logits of a tiny llama, which are about 1.4, by up to 0.0014.
ONE_RANK_LOGITS = 0.005  # by how much they may differ
ONE_RANK_EXCUSED = 0.01  # share of the tokens whose choice is so close
NOTHING = Answer((), (), ())
PLENTY_OF_BYTES = 1 << 28
ADAPTED, DIVIDED, REDUCED = " adapted", " divided", " divided reduced"


@dataclass
class OneRankTally:
    """Answers of quantised models against one rank."""

    tokens: int = 0
    excused: int = 0


class RecordingRunner(Runner):
    """Notes the drafts of a head: (of which history, of which request, after how many cells) -> tokens."""

    history: object = None
    drafts: dict[tuple[object, int, int], tuple[int, ...]]

    def finish(self, launched: LaunchedPasses) -> StepResult:
        result = super().finish(launched)
        rows = [row for output in launched.outputs for row in output.batch]
        for row, found in zip(rows, result.rows, strict=True):
            num_cells = row.start + row.num_fed - row.num_drafts + found.num_accepted
            if found.drafts:
                self.drafts[self.history, row.sequence_id, num_cells] = found.drafts
        return result


class RankWorld(World):
    """A tiny model on several ranks. What answers are compared with is of the whole model."""

    files: Mapping[str, AdapterFiles] = {}

    def __init__(self, name: str, ranks: Ranks, block_size: int | None, head: str = "") -> None:
        """`head`: DIVIDED or REDUCED; otherwise the heads are whole."""
        super().__init__(name, SIZES[_family(name)])
        self.ranks = ranks
        self._has_experts = "moe" in name
        trunk, divided = rank_parts(name, ranks, self.files, head)
        check_output(trunk, ranks)
        self._rank_runners = {
            size: RecordingRunner(trunk, drafter, block_size=block_size, ranks=ranks)
            for size, drafter in self.drafters.items()
        }
        self.whole_runner: RecordingRunner | None = None  # that a divided head is compared with
        if divided is not None:
            self.whole_runner = self._rank_runners["reduced" if head == REDUCED else "whole"]
            runner = RecordingRunner(trunk, divided, block_size=block_size, ranks=ranks)
            self._rank_runners |= {"whole": runner, "reduced": runner}
        for runner in (*self._rank_runners.values(), *([self.whole_runner] if divided else [])):
            runner.drafts = {}
        self.runners = self._rank_runners
        self._runner_alone = Runner(trunk, block_size=block_size, ranks=ranks)  # without cached prefixes
        if block_size is not None:
            self.block_sizes = (block_size,)
        self.one_rank = OneRankTally()
        self._own_answers: dict[str, Answer] = {}

    def block_runner(self, head: HeadSize, block_size: int) -> Runner:
        return self._rank_runners[head]

    def answer(self, ask: Ask, so_far: Sequence[int] = ()) -> Answer:
        return self._own_answers[_key(ask)] if self._rounds else super().answer(ask, so_far)

    def prepare(self, history: History) -> None:
        """Ask each request of a history alone. Not while one is played: the ranks have one set of rows."""
        for ask in history.asks if self._rounds else ():
            if _key(ask) not in self._own_answers:
                token_ids = self._alone(ask)
                self._compare_with_one_rank(ask, token_ids)
                num = len(token_ids)
                self._own_answers[_key(ask)] = Answer(tuple(token_ids), (True,) * num, (np.zeros(0),) * num)

    def _alone(self, ask: Ask) -> list[int]:
        ask = replace(ask, kind="plain", joins_at=0, cancelled_at=None)
        history = History(1, (ask,), "none", 1, 64, 64, 100.0, frozenset(), inspects=False, scribbles=False)
        self._runner_alone.reset()
        world: Any = _NoAnswers(self)
        player = _AlonePlayer(world, history, self._runner_alone, None)
        player.run()
        return player.token_ids

    def _compare_with_one_rank(self, ask: Ask, found: Sequence[int]) -> None:
        if self._has_experts:
            return
        params, so_far = ask.params, list[int]()
        while True:
            row = self.row_alone(params)
            expected = solo_answer(row, ask.prompt, params, so_far, ONE_RANK_LOGITS)
            place = _first_difference(expected.token_ids, found)
            if place is None:
                break
            if expected.is_firm[place]:
                raise Divergence(f"{ask} gave {found}, on one rank {expected.token_ids}: token {place}")
            self.one_rank.excused += 1
            so_far = list(found[: place + 1])
        self.one_rank.tokens += len(found)


class AdaptedRankWorld(RankWorld, AdaptedWorld):
    """Its requests may name adapters."""


def _key(ask: Ask) -> str:
    return repr((ask.prompt, ask.params))


class WithWholeHead:
    """The same world, whose head is whole."""

    def __init__(self, world: RankWorld, runner: RecordingRunner) -> None:
        self._world = world
        self.runners = dict.fromkeys(world.runners, runner)

    def block_runner(self, head: HeadSize, block_size: int) -> Runner:
        return self.runners[head]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world, name)


class _NoAnswers:
    """A world for a request whose answer is not known yet."""

    head_layers = World.head_layers
    num_head_buffers = World.num_head_buffers
    can_pause_head = World.can_pause_head

    def __init__(self, world: World) -> None:
        self.vocab_size = world.vocab_size
        self._world = world

    def answer(self, ask: Ask) -> Answer:
        return NOTHING

    def adapter_of(self, params: SamplingParams) -> AdapterInfo | None:
        return self._world.adapter_of(params)


class _AlonePlayer(_Player):
    token_ids: list[int]

    def _check_answer(self, live: _Live) -> None:
        self.token_ids = live.token_ids


class RankSession(Session):
    """The other ranks have folders inside rank 0's, so their files are damaged too."""

    def __init__(self, world: RankWorld, seed: int, folder: Path, num_histories: int) -> None:
        super().__init__(world, seed, folder, num_histories)
        self._rank_world = world
        self._has_disk = True  # also where the seed would have none

    def _new_tier(self, folder: BlockFolder) -> DiskTier:
        return FirstRankDisk(folder, self._rank_world.ranks)

    def _play(self, number: int) -> None:
        self._runner.history = "session", number
        super()._play(number)

    def _shared(self, history: History) -> History:
        history = replace(super()._shared(history), inspects=False)
        self._rank_world.prepare(history)
        return history


def rank_parts(
    name: str, ranks: Ranks, files: Mapping[str, AdapterFiles], head: str
) -> tuple[Trunk, LoadedHead | None]:
    """This rank's part of the model and of the head, as they are served, with its part of the adapters."""
    model = stored_model(name, SIZES[_family(name)])
    shard(model, ranks.group, _family(name))
    settle_dtype(model, "auto")
    trunk = Trunk(model, max_context=256)
    divided = divided_head(trunk, name, ranks, head) if head else None
    trunk.prepare_for_serving()
    check_fused(trunk.model.layers, name)
    if divided is not None:
        divided.prepare_for_serving(trunk)
        check_fused(divided.layers[0].layers, name)
    load_all(trunk, files)
    return trunk, divided


def divided_head(trunk: Trunk, name: str, ranks: Ranks, head: str) -> LoadedHead:
    """This rank's part of the head of the whole world."""
    layer = random_head(trunk)
    if is_quantized_name(name):
        nn.quantize(layer, group_size=32, bits=4)
    divide([layer], trunk, ranks.group)
    settle_dtype(layer, "auto", trunk.dtype)
    vocab_size = trunk.model.args.vocab_size
    return LoadedHead((layer,), "random", some_ids(vocab_size) if head == REDUCED else None, is_divided=True)


def adapter_files(name: str) -> dict[str, AdapterFiles]:
    """The same on every rank."""
    return written_adapters({adapter: _model(name, SIZES[_family(name)]) for adapter in ADAPTERS})


def check_fused(layers: Sequence[nn.Module], name: str) -> None:
    """Where one rank has fused layers, this one has them too."""
    is_native = any(is_kept(layer) for _, layer in layers[0].named_modules())
    if is_native and _family(name) in FUSED:
        kinds = [type(layer) for layer in layers]
        assert all(fused_layers.plain_class(kind) is not kind for kind in kinds), kinds


def check_output(trunk: Trunk, ranks: Ranks) -> None:
    """The logits of all ranks are those of the whole projection, which rank 0 has."""
    hidden = mx.random.normal((5, 1, trunk.hidden_size), key=mx.random.key(3))
    divided = DividedOutput(trunk, ranks.group)(hidden)
    if ranks.rank > 0:
        return
    whole = trunk.logits(hidden)
    assert divided.shape == whole.shape
    is_quantized = any(quantized_layers(trunk.model))
    assert mx.array_equal(divided, whole) if is_quantized else mx.allclose(divided, whole, atol=1e-5)


def play_all(world: RankWorld, seed: int, num: int, has_blocks: bool, folder: Path) -> dict[str, float]:
    tally, new_history = Tally(), adapted_history if world.files else random_history
    for number in range(num):
        # Cells are those of a part of the heads: only the tokens are compared.
        history = replace(new_history(seed + number, world.vocab_size), inspects=False)
        world.prepare(history)
        runner = world.runners[history.head]
        runner.history = seed + number
        tally.add(play(world, history, runner=runner))
        if history.head != "none" and world.whole_runner is not None:
            world.whole_runner.history = seed + number
            play(world, history, runner=world.whole_runner)
    session_seed, num_in_session = 3 * seed + has_blocks, max(2, num // 3)
    found = RankSession(world, session_seed, folder, num_in_session).run()
    tally.add(found.played)
    if world.whole_runner is not None:
        with_whole: Any = WithWholeHead(world, world.whole_runner)
        RankSession(with_whole, session_seed, folder / "whole", num_in_session).run()
    print(found.summary(), file=sys.stderr)
    return {
        "tokens": tally.tokens,
        "excused": tally.excused,
        "accepted": sum(num * accepted for (_, _, accepted), num in tally.accepted.items()),
        "cancelled": tally.finished["cancelled"],
        "preemptions": tally.preemptions,
        "caught_up": tally.caught_up,
        "held": tally.held.total(),
        "hit_cells": found.hit_cells,
        "disk_reads": found.disk_reads,
        "one_rank_tokens": world.one_rank.tokens,
        "one_rank_excused": world.one_rank.excused,
        **compared_drafts(world),
    }


def compared_drafts(world: RankWorld) -> dict[str, int]:
    """The drafts that the whole and the divided head have made at the same place, and those that differ.

    After a draft that differs, the next ones of the same list are not compared: the heads were fed others.
    `drafts_of_one_head`: places where only one of the two has made drafts.
    """
    num, num_other, num_more = 0, 0, 0
    if world.whole_runner is not None:
        of_divided = world.runners["whole"].drafts
        for place, drafts in world.whole_runner.drafts.items():
            for one, other in zip(drafts, of_divided.get(place, ()), strict=False):
                num, num_other = num + 1, num_other + (one != other)
                if one != other:
                    break
        num_more = len(of_divided.keys() ^ world.whole_runner.drafts.keys())
    return {"drafts": num, "other_drafts": num_other, "drafts_of_one_head": num_more}


def lose_moves() -> None:
    RaggedKV.exchange = lambda *_: None  # type: ignore[method-assign]


def keep_own_values() -> None:
    """What rank 0 says of accepted drafts, and of the tokens that the head is fed, is not heard."""
    launched_from_first = Ranks.launched_from_first

    def wrong(self: Ranks, array: mx.array) -> mx.array:
        mx.eval(launched_from_first(self, array))
        return array

    Ranks.launched_from_first = wrong  # type: ignore[method-assign]


def forget_adapters() -> None:
    from_plan = InputBatch.from_plan

    def forgetful(*batch: Any) -> InputBatch:
        return replace(from_plan(*batch), adapters=None)

    InputBatch.from_plan = forgetful  # type: ignore[method-assign,assignment]


def lose_deferred_inputs() -> None:
    DeferredHeadInputs.store = lambda *_: None  # type: ignore[method-assign]


FAULTS = {
    "": lambda: None,
    "draft alone": keep_own_values,
    "lose deferred inputs": lose_deferred_inputs,
    "lose moves": lose_moves,
    "commit rejected drafts": keep_own_values,
    "forget adapters": forget_adapters,
}


def main(name: str, block_size_text: str, seed: str, num: str, out: str, fault: str = "") -> None:
    ranks, block_size = Ranks(mx.distributed.init(strict=True)), int(block_size_text) or None
    is_adapted, name = name.endswith(ADAPTED), name.removesuffix(ADAPTED)
    head = next((one for one in (REDUCED, DIVIDED) if name.endswith(one)), "")
    name = name.removesuffix(head)
    folder = Path(out).with_suffix(".blocks")
    if ranks.rank > 0:
        FAULTS[fault]()
        tier = DiskTier(BlockFolder(folder / f"rank-{ranks.rank}", "abcd", PLENTY_OF_BYTES))
        disk, files = FollowerDisk(tier), adapter_files(name) if is_adapted else {}
        trunk, divided = rank_parts(name, ranks, files, head)
        check_output(trunk, ranks)
        runner = Runner(trunk, divided, tier.write, block_size=block_size, ranks=ranks, read_block=disk.read)
        follow(ranks, runner, disk)
        tier.close()
        return
    world = (AdaptedRankWorld if is_adapted else RankWorld)(name, ranks, block_size, head)
    found = play_all(world, int(seed), int(num), block_size is not None, folder)
    ranks.send([step_message.STOP])
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
