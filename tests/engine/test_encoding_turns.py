"""Encoding's share of the engine's time."""

from outrider.engine.loop import EncodingTurns


def test_after_a_piece_steps_get_as_much_time():
    turns = EncodingTurns()
    assert turns.may_encode(3)
    turns.encoded(0.5)
    assert not turns.may_encode(3)
    turns.stepped(0.3)
    assert not turns.may_encode(1)
    turns.stepped(0.3)
    assert turns.may_encode(1)


def test_nobody_decoding_means_no_waiting():
    turns = EncodingTurns()
    turns.encoded(10.0)
    assert turns.may_encode(0)


def test_time_without_pictures_is_not_saved_up():
    turns = EncodingTurns()
    for _ in range(100):
        turns.stepped(1.0)
    turns.encoded(0.5)
    assert not turns.may_encode(1)
