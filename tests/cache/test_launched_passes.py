"""A pass of many tokens on CUDA does not run ahead of the device without a bound."""

from __future__ import annotations

import mlx.core as mx
import pytest

from outrider.cache.placement import LAUNCH_EVERY_LAYERS, MANY_TOKENS, MAX_LAUNCHED, Placement


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
