"""What the prefix cache loads and saves, which rows wait, and what it must never do; on the fake runner."""

from __future__ import annotations

import inspect
import random

import pytest
from fake_runner import VOCAB_SIZE
from scheduler_harness import Harness, planned_ids, rows_of

from outrider.engine.prefix import cache as cache_module
from outrider.engine.prefix.cache import PrefixCache, new_prefix_cache
from outrider.engine.prefix.checkpoints import CHECKPOINT_DISTANCE, prompt_checkpoints
from outrider.engine.prefix.no_cache import NoPrefixCache
from outrider.engine.sequence import Sequence
from outrider.plan import CacheGeometry, StepPlan
from outrider.request import MAX_DEPTH

PLENTY = 10**9
BLOCK = 8
WITH_STATES = CacheGeometry(bytes_per_cell=1, bytes_per_slot=50, capacity_step=16)


def _harness(**changes: object) -> Harness:
    return Harness(**{"prefix_bytes": PLENTY, "block_size": BLOCK, "prefill_step_size": 64, **changes})


def _text(num: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE) for _ in range(num)]


def _finish(harness: Harness, *sequences: Sequence) -> list[StepPlan]:
    plans = []
    while any(sequence.id in harness.live for sequence in sequences):
        plan = harness.step()
        assert plan is not None
        plans.append(plan)
    return plans


def _num_prefilled(plans: list[StepPlan]) -> int:
    return sum(row.num_fed for plan in plans for row in rows_of(plan) if row.start < row.num_prompt)


def test_the_next_turn_computes_only_what_is_new() -> None:
    harness = _harness()
    first = harness.add(_text(100), max_tokens=20)
    assert _num_prefilled(_finish(harness, first)) == 100
    second = harness.add(first.tokens + _text(10, seed=1))
    assert _num_prefilled(_finish(harness, second)) == 11, "the last token of an answer is never fed"
    assert second.stats().num_cached == 119
    harness.run_to_idle()


def test_the_same_prompt_again_feeds_its_last_token_only() -> None:
    harness = _harness()
    _finish(harness, harness.add(_text(100)))
    again = harness.add(_text(100))
    assert _num_prefilled(_finish(harness, again)) == 1
    assert again.stats().num_cached == 99
    harness.run_to_idle()


@pytest.mark.parametrize(("depth", "num_fed"), [(0, 31), (3, 32)])
def test_a_fork_is_taken_to_the_cell_and_with_a_head_one_cell_less(depth: int, num_fed: int) -> None:
    """The head's pair at the last shared cell was made with the other text's next token."""
    harness = _harness()
    text = _text(100)
    _finish(harness, harness.add(text, depth=depth))
    fork = harness.add([*text[:70], (text[70] + 1) % VOCAB_SIZE, *_text(30, seed=1)], depth=depth)
    assert _num_prefilled(_finish(harness, fork)) == num_fed
    harness.run_to_idle()


def test_a_fork_at_the_end_of_a_block_has_the_right_pair_for_everyone() -> None:
    """The block before the fork is the same text; the head's last pair in it is not."""
    harness = _harness()
    text = _text(8 * BLOCK)
    for seed in (1, 2, 1, 2):
        _finish(harness, harness.add([*text, seed, *_text(40, seed)], depth=3))
    assert harness.runner.num_loaded > 0
    harness.run_to_idle()


def test_rows_with_and_without_a_head_do_not_share_unless_plain_rows_store_the_heads_inputs() -> None:
    harness = _harness()
    _finish(harness, harness.add(_text(100), depth=0))
    assert _num_prefilled(_finish(harness, harness.add(_text(100), depth=2))) == 100
    assert _num_prefilled(_finish(harness, harness.add(_text(100), depth=2))) == 1
    harness.run_to_idle()


BLOCKS = CacheGeometry(bytes_per_cell=1, block_size=BLOCK)


@pytest.mark.parametrize("geometry", [None, BLOCKS, WITH_STATES], ids=["slots", "blocks", "states"])
@pytest.mark.parametrize(("first", "second"), [(0, 3), (3, 0)])
def test_plain_and_drafting_rows_share(first: int, second: int, geometry: CacheGeometry | None) -> None:
    """The fake runner checks that the head is fed what a plain row has stored for it."""
    harness = _harness(plain_rows_store=True, geometry=geometry)
    text = _text(100)
    _finish(harness, harness.add(text, depth=first, max_tokens=20))
    again = harness.add(text, depth=second, max_tokens=20)
    _finish(harness, again)
    third = harness.add([*text, *_text(10, seed=3)], depth=3 - second, max_tokens=20)
    _finish(harness, third)
    assert again.stats().num_cached == (96 if geometry is WITH_STATES else 99)
    assert third.stats().num_cached >= 96
    harness.run_to_idle()


def test_plain_and_drafting_rows_that_come_at_once_share() -> None:
    harness = _harness(plain_rows_store=True)
    rows = [harness.add([*_text(80), i], depth=depth) for i, depth in enumerate((0, 3, 0, 2))]
    assert _num_prefilled(_finish(harness, *rows)) <= 81 + 3 * 2
    harness.run_to_idle()


def test_a_head_is_not_fed_all_of_a_plain_rows_long_prompt_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a row that drafts wait for cells that it cannot use."""
    monkeypatch.setattr(cache_module, "MAX_HEAD_LAG", 32)
    harness = _harness(plain_rows_store=True)
    plain, drafting = harness.add(_text(400), max_tokens=30), harness.add(_text(400), depth=3, max_tokens=30)
    harness.run_until(lambda: plain.is_decoding)
    assert 0 < drafting.stats().num_cached < 200
    assert drafting.num_cached > 64, "it computes cells beside the other row"
    harness.run_to_idle()
    again = harness.add(_text(400), max_tokens=30)
    _finish(harness, again)
    assert again.stats().num_cached == 399
    harness.run_to_idle()


def test_a_row_with_another_salt_finds_nothing() -> None:
    harness = _harness()
    _finish(harness, harness.add(_text(100), salt="one"))
    other = harness.add(_text(100), salt="other")
    assert _num_prefilled(_finish(harness, other)) == 100
    assert other.stats().num_cached == 0
    assert _num_prefilled(_finish(harness, harness.add(_text(100), salt="one"))) == 1


def test_salts_that_leave_nothing_are_forgotten() -> None:
    """Clients make them up: a server must not remember them all."""
    harness = _harness(prefix_bytes=10)
    for number in range(20):
        _finish(harness, harness.add(_text(20), salt=f"client {number}"))
    assert harness.prefix is not None
    assert len(harness.prefix.index._roots) <= 1
    harness.run_to_idle()


def test_requests_that_come_at_once_compute_what_they_share_once() -> None:
    harness = _harness(max_rows=8, prefill_step_size=16)
    shared = _text(100)
    several = [harness.add(shared + _text(20, seed=1 + i)) for i in range(8)]
    assert _num_prefilled(_finish(harness, *several)) <= 100 + 8 * 20
    harness.run_to_idle()


def test_who_waits_for_an_older_row_goes_on_when_that_one_leaves() -> None:
    harness = _harness(prefill_step_size=16)
    leader, follower = harness.add(_text(100)), harness.add(_text(100))
    plan = harness.step()
    assert planned_ids(plan) == [leader.id]
    harness.cancel(leader)
    assert planned_ids(harness.step()) == [follower.id]
    assert follower.num_cached == 32, "what the leader computed is used"
    harness.run_to_idle()


def test_who_waits_does_not_hold_up_others() -> None:
    harness = _harness(prefill_step_size=16, max_rows=4)
    leader, follower = harness.add(_text(100)), harness.add(_text(100))
    other = harness.add(_text(16, seed=5))
    ids = [planned_ids(harness.step()) for _ in range(3)]
    assert leader.id in ids[0]
    assert any(other.id in step for step in ids[:2])
    assert all(follower.id not in step for step in ids)
    harness.run_to_idle()


def test_without_room_nobody_waits_for_ever() -> None:
    harness = _harness(prefill_step_size=16, prefix_bytes=10)
    several = [harness.add(_text(100)) for _ in range(3)]
    assert _num_prefilled(_finish(harness, *several)) > 100 + 90
    harness.run_to_idle()


def test_a_preempted_row_finds_its_cells_again() -> None:
    geometry = CacheGeometry(bytes_per_cell=1, capacity_step=16)
    harness = _harness(geometry=geometry, budget_bytes=3 * 81, prefill_step_size=64)
    several = [harness.add(_text(10, seed=i), max_tokens=90) for i in range(3)]
    plans = _finish(harness, *several)
    assert sum(sequence.counters.preemptions for sequence in several) >= 1
    assert _num_prefilled(plans) == 30
    assert all(sequence.stats().num_cached == 0 for sequence in several), "that is no saving for the client"
    harness.run_to_idle()


def test_a_failed_step_leaves_nothing_in_the_cache() -> None:
    harness = _harness(prefill_step_size=16)
    _finish(harness, harness.add(_text(60, seed=3)))
    row = harness.add(_text(100))
    harness.step()
    harness.runner.raises_next = True
    harness.step()
    assert harness.prefix is not None
    assert harness.prefix.index.num_bytes == 0
    harness.run_to_idle()
    assert row.stats().num_cached == 0


def test_a_cancelled_rows_cells_are_kept() -> None:
    harness = _harness()
    row = harness.add(_text(60), max_tokens=50)
    harness.steps(5)
    harness.cancel(row)
    assert _num_prefilled(_finish(harness, harness.add(_text(60)))) == 1
    harness.run_to_idle()


def test_an_answers_blocks_are_saved_several_at_a_time() -> None:
    harness = _harness()
    row = harness.add(_text(20), max_tokens=100)
    plans = _finish(harness, row)
    saves = [len(plan.copies.saves) for plan in plans[3:] if plan.copies.saves]
    assert saves == [4, 4, 4], "and the last ones when it has ended"
    assert _num_prefilled(_finish(harness, harness.add([*row.tokens, 1]))) == 2
    harness.run_to_idle()


def test_another_image_in_the_same_words_does_not_hit() -> None:
    """Image tokens are alike; the keys of the cells are the image's own."""
    harness = _harness()
    text = _text(100)
    for image_key, num_fed in ((-1, 100), (-2, 80), (-1, 1)):
        keys = (*text[:20], *[image_key] * 40, *text[60:])
        assert _num_prefilled(_finish(harness, harness.add(text, keys=keys))) == num_fed
    harness.run_to_idle()


def test_an_answer_with_a_paused_head_is_loaded_and_the_head_catches_up() -> None:
    """A paused head's inputs are stored with the cells; the next turn's row feeds them to the head."""
    harness = _harness()
    first = harness.add(_text(40), max_tokens=60, depth=3, is_auto=True)
    first.drafting.head_depth = 3
    plans = _finish(harness, first)
    assert any(row.defers_head for plan in plans for row in rows_of(plan)), "this engine pauses its head"
    for number in range(2):
        turn = harness.add([*first.tokens, 1, 2, 3 + number], depth=3)
        plans = _finish(harness, turn)
        assert _num_prefilled(plans) == (4, 2)[number]
        behind = [row.head_lag for row in rows_of(plans[0])]
        assert (max(behind) > 0) == (number == 0), "the second time its cells are cached too"
    harness.run_to_idle()


def test_rows_that_share_cells_of_a_paused_head_all_have_them_fed() -> None:
    """The second waits for the first, whose head catches up: what it then loads begins where its own ends."""
    harness = _harness(prefill_step_size=16)
    first = harness.add(_text(40), max_tokens=60, depth=3, is_auto=True)
    _finish(harness, first)
    turns = [harness.add([*first.tokens, *_text(60, seed=1), 3 + i], depth=3) for i in range(2)]
    plans = _finish(harness, *turns)
    assert sum(len(plan.copies.loads) for plan in plans) > 2, "the second took what the first computed"
    harness.run_to_idle()


def test_a_row_that_meets_cells_of_a_paused_head_keeps_its_own() -> None:
    """The row's own head was fed what the row computed: no inputs of these cells are stored."""
    harness = _harness(prefill_step_size=2, min_loaded_cells=1)
    paused = harness.add(_text(8), max_tokens=60, depth=3, is_auto=True)
    harness.run_until(lambda: paused.num_cached >= 30)
    text = [*_text(8), *harness.truth(paused)[0]]
    row = harness.add([*text, 1, 2, 3], depth=3)
    plans = _finish(harness, row)
    behind = [planned for plan in plans for planned in rows_of(plan) if planned.head_lag]
    assert any(planned.sequence_id == row.id and planned.start > 20 for planned in behind)
    harness.run_to_idle()


def test_a_head_that_was_paused_for_very_long_is_not_fed_everything_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("outrider.engine.prefix.cache.MAX_HEAD_LAG", 20)
    for geometry in (None, WITH_STATES):
        harness = _harness(geometry=geometry)
        first = harness.add(_text(40), max_tokens=60, depth=3, is_auto=True)
        _finish(harness, first)
        plans = _finish(harness, harness.add([*first.tokens, 1, 2], depth=3))
        behind = [row.head_lag for plan in plans for row in rows_of(plan)]
        assert max(behind) <= 20
        assert plans[0].copies.loads
        harness.run_to_idle()


def test_large_loads_are_spread_over_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.engine.prefix.cache.MAX_COPIED_BYTES", 32)
    harness = _harness(prefill_step_size=16)
    first = harness.add(_text(200))
    _finish(harness, first)
    busy = harness.add(_text(8, seed=1), max_tokens=60)
    harness.step()
    second = harness.add(_text(200))
    plans = _finish(harness, second)
    loaded = [sum(load.num_cells for load in plan.copies.loads) for plan in plans]
    assert max(loaded) <= 32
    assert sum(loaded) == 199
    assert all(busy.id in planned_ids(plan) for plan in plans[:7]), "the others decode meanwhile"
    harness.run_to_idle()


def test_clearing_gives_every_byte_back() -> None:
    harness = _harness()
    _finish(harness, harness.add(_text(100)), harness.add(_text(50, seed=1)))
    assert harness.prefix is not None
    harness.step()
    assert harness.runner.prefix_bytes == harness.prefix.index.num_bytes > 150
    harness.prefix.clear()
    harness.step()
    assert harness.runner.prefix_bytes == harness.prefix.index.num_bytes == 0
    harness.run_to_idle()


def test_what_is_cleared_is_let_go_while_steps_are_launched_ahead() -> None:
    harness = Harness(prefix_bytes=10**6, block_size=64, ahead=1.0, geometry=CacheGeometry(1, 0, 256))
    harness.add(130, max_tokens=1)
    harness.run_to_idle()
    harness.add(4, max_tokens=200)
    harness.steps(8)
    assert harness.num_ahead
    assert harness.runner.prefix_bytes
    harness.scheduler.clear_prefix_cache()
    harness.steps(3)
    assert harness.runner.prefix_bytes == harness.scheduler.prefix_bytes
    harness.run_to_idle()


# -- recurrent layers: a state cannot be cut ---------------------------------------------------------------


def test_with_states_a_hit_restarts_at_the_last_one_before_the_difference() -> None:
    harness = _harness(geometry=WITH_STATES)
    text = _text(100)
    _finish(harness, harness.add(text))
    again = harness.add(text)
    assert _num_prefilled(_finish(harness, again)) == 100 - 96, "the prompt's last whole block"
    harness.run_to_idle()


def test_with_states_the_next_turn_restarts_at_the_answers_last_block() -> None:
    for depth in (0, 3, 8):
        harness = _harness(geometry=WITH_STATES)
        first = harness.add(_text(100), max_tokens=40, depth=depth)
        _finish(harness, first)
        second = harness.add(first.tokens + _text(10, seed=1), depth=depth)
        assert _num_prefilled(_finish(harness, second)) == 150 - 136
        harness.run_to_idle()


def test_with_states_the_second_fork_leaves_a_state_for_the_third() -> None:
    harness = _harness(geometry=WITH_STATES, prefill_step_size=200)
    shared = _text(75)
    fed = []
    for seed in (1, 2, 3):
        fork = harness.add(shared + _text(25, seed))
        fed.append(_num_prefilled(_finish(harness, fork)))
    assert fed == [100, 100, 100 - 72]
    harness.run_to_idle()


def test_with_states_requests_that_come_at_once_share_too() -> None:
    harness = _harness(geometry=WITH_STATES, max_rows=8, prefill_step_size=200)
    shared = _text(100)
    several = [harness.add(shared + _text(20, seed=1 + i)) for i in range(8)]
    assert _num_prefilled(_finish(harness, *several)) <= 120 + 7 * (20 + BLOCK)
    harness.run_to_idle()


def test_only_the_latest_state_of_an_answer_is_kept() -> None:
    harness = _harness(geometry=WITH_STATES)
    _finish(harness, harness.add(_text(20), max_tokens=100, depth=4))
    harness.step()
    assert len(harness.runner.states) == 2, "the prompt's and the answer's"
    harness.run_to_idle()


def test_checkpoints_are_ends_of_blocks_at_messages_and_at_regular_distances() -> None:
    end = 99
    prompt = [*[1] * 69, end, *[2] * 100, end, *[3] * 100, end, *[4] * 100, end, 5, 6]
    assert prompt_checkpoints(prompt, {end}, 64) == {64, 256, 320}, (
        "the first message's end, the last two's, the prompt's"
    )
    assert prompt_checkpoints([1] * 64, {end}, 64) == set(), "something must be left to feed"
    assert prompt_checkpoints([1] * (2 * CHECKPOINT_DISTANCE + 5), {end}, 64) == {
        CHECKPOINT_DISTANCE - 64,
        2 * CHECKPOINT_DISTANCE - 64,
        2 * CHECKPOINT_DISTANCE,
    }


def test_a_chunk_ends_at_the_next_checkpoint() -> None:
    harness = _harness(geometry=WITH_STATES, prefill_step_size=200)
    row = harness.add(_text(75))
    harness.step()
    assert row.num_cached == 72
    assert harness.prefix is not None
    assert harness.prefix.chunk_end(row, 75) == 75
    harness.run_to_idle()


# -- an engine without a prefix cache ----------------------------------------------------------------------


def test_no_prefix_cache_has_the_interface_of_the_prefix_cache() -> None:
    methods = {name: method for name, method in vars(NoPrefixCache).items() if inspect.isfunction(method)}
    assert methods
    for name, method in methods.items():
        assert inspect.signature(method) == inspect.signature(getattr(PrefixCache, name)), name
    names = {name for name in (*vars(NoPrefixCache), *vars(PrefixCache)) if not name.startswith("_")}
    assert names == {name for name in vars(NoPrefixCache) if not name.startswith("_")}


def test_no_prefix_cache_lets_every_row_compute_and_copies_nothing() -> None:
    cache = new_prefix_cache(WITH_STATES, 0, None)
    assert isinstance(cache, NoPrefixCache)
    harness = Harness(prefill_step_size=64)
    row, plan = harness.add(_text(20)), None
    plan = harness.step()
    assert plan is not None
    assert cache.ready_rows([row]) == [row]
    assert cache.chunk_end(row, 20) == 20
    assert cache.max_drafts(row) == cache.max_drafts(row, rows_of(plan)[0]) == MAX_DEPTH
    assert not cache.may_end_block(row, 64)
    cache.save(row, to_end=True)
    cache.save_before_leaving(row)
    cache.leave(row)
    cache.clear()
    cache.wait_for_disk(1.0)
    cache.check_integrity()
    assert not cache.has_copies
    assert not cache.take_copies()
    assert cache.num_bytes == 0


def test_a_budget_makes_a_prefix_cache() -> None:
    cache = new_prefix_cache(WITH_STATES, 1000, None)
    assert isinstance(cache, PrefixCache)
