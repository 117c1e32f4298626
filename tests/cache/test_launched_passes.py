"""A pass of many tokens on CUDA does not run ahead of the device without a bound."""

from __future__ import annotations

import random

import mlx.core as mx
import pytest

from outrider.cache.placement import LAUNCH_EVERY_LAYERS, MAX_LAUNCHED, Placement, most_held
from outrider.cache.recurrent import RecurrentState, StateSpec, StateView
from outrider.plan import MANY_TOKENS


@pytest.mark.parametrize(("num_tokens", "waits"), [(MANY_TOKENS, True), (MANY_TOKENS - 1, False)])
def test_long_passes_wait_for_their_earlier_launches(
    num_tokens: int, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    counts = mx.array([0]), mx.array([num_tokens])
    place = Placement([0], *counts, num_tokens, num_tokens, num_tokens + 16, launches=True)
    launched: list[mx.array] = []
    awaited: list[mx.array] = []
    monkeypatch.setattr(mx, "async_eval", lambda *arrays: launched.extend(arrays))
    monkeypatch.setattr(mx, "eval", lambda *arrays: awaited.extend(arrays))
    layers = [mx.array(number) for number in range(6 * LAUNCH_EVERY_LAYERS)]
    for layer in layers:
        place.launch_every_few_layers(layer)
    assert [id(one) for one in launched] == [
        id(one) for one in layers[LAUNCH_EVERY_LAYERS - 1 :: LAUNCH_EVERY_LAYERS]
    ]
    expected = launched[:-MAX_LAUNCHED] if waits else []
    assert [id(one) for one in awaited] == [id(one) for one in expected]


@pytest.mark.parametrize("num_layers", range(6 * LAUNCH_EVERY_LAYERS))
def test_what_a_long_pass_holds_is_known_beforehand(num_layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    counts = mx.array([0]), mx.array([MANY_TOKENS])
    place = Placement([0], *counts, MANY_TOKENS, MANY_TOKENS, MANY_TOKENS, launches=True)
    by_layer = [random.Random(f"{num_layers} {layer}").randrange(100) for layer in range(num_layers + 1)]
    built, most = 0, 0
    held: list[int] = []

    def launch(*_: mx.array) -> None:
        nonlocal built, most
        held.append(built)
        built, most = 0, max(most, sum(held))

    monkeypatch.setattr(mx, "async_eval", launch)
    monkeypatch.setattr(mx, "eval", lambda *_: held.pop(0))
    for num_bytes in by_layer[:-1]:
        built += num_bytes
        place.launch_every_few_layers(counts[0])
    built += by_layer[-1]
    launch()  # the end of the step
    assert most_held(by_layer) == most


@pytest.mark.parametrize(("num_tokens", "num_launches"), [(MANY_TOKENS, 3), (MANY_TOKENS - 1, 0)])
def test_recurrent_layers_of_long_passes_count_too(
    num_tokens: int, num_launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hybrid may have three recurrent layers between two attention layers."""
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    counts = mx.array([0]), mx.array([num_tokens])
    place = Placement([0], *counts, num_tokens, num_tokens, num_tokens, commits_all=True, launches=True)
    launched: list[mx.array] = []
    monkeypatch.setattr(mx, "async_eval", lambda *arrays: launched.extend(arrays))
    for _ in range(3 * LAUNCH_EVERY_LAYERS):
        state = RecurrentState(StateSpec(((2,), (3,)), (mx.float32, mx.float32)))
        state.resize(1, 0)
        view = StateView(state, place)
        before = len(launched)
        view.on_commit(0, lambda _: mx.ones((1, 2)))
        assert len(launched) == before, "the layer has another part"
        view.on_commit(1, lambda _: mx.ones((1, 3)))
    assert len(launched) == 2 * num_launches
