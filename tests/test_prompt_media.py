import numpy as np
import pytest

from outrider.prompt_media import MediaPiece, PromptMedia, TokenGrid, grid_positions


def piece(key: str, *cells: int) -> MediaPiece:
    return MediaPiece(key, {}, np.array(cells, np.int32))


MEDIA = PromptMedia((piece("a", 2, 3, 4, 5), piece("b", 9, 10)))


def test_pieces_within_a_chunk():
    assert [p.key for p in MEDIA.within(0, 2)] == []
    assert [p.key for p in MEDIA.within(5, 6)] == ["a"]
    assert [p.key for p in MEDIA.within(5, 10)] == ["a", "b"]
    assert [p.key for p in MEDIA.within(11, 20)] == []


def test_first_missing_piece():
    assert MEDIA.first_missing(set()) is MEDIA.pieces[0]
    assert MEDIA.first_missing({"a"}) is MEDIA.pieces[1]
    assert MEDIA.first_missing({"a", "b"}) is None
    assert MEDIA.first_missing(set(), start=5) is MEDIA.pieces[0]
    assert MEDIA.first_missing(set(), start=6) is MEDIA.pieces[1]
    assert MEDIA.first_missing(set(), start=11) is None


def test_distinct_ids_tell_pictures_apart_and_leave_text_alone():
    ids = list(range(100, 112))
    found = MEDIA.distinct_ids(ids)
    other = PromptMedia((piece("c", 2, 3, 4, 5), piece("b", 9, 10))).distinct_ids(ids)
    changed = [i for i in range(12) if found[i] != ids[i]]
    assert changed == [2, 3, 4, 5, 9, 10]
    assert all(found[i] < 0 for i in changed)
    assert [i for i in range(12) if found[i] != other[i]] == [2, 3, 4, 5]


def test_requests_with_different_salts_share_no_key():
    keys = [MEDIA.salted(salt).keys for salt in ("", "one", "two")]
    assert keys[0] == MEDIA.keys
    assert len({key for some in keys for key in some}) == 6
    assert MEDIA.salted("one").keys == keys[1]
    assert [p.cells.tolist() for p in MEDIA.salted("one").pieces] == [[2, 3, 4, 5], [9, 10]]


def test_grid_positions_of_the_picture_in_the_docstring():
    positions, delta = grid_positions([1, 1, 7, 7, 7, 7, 1, 1, 1], [7], [TokenGrid(2, 2)])
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 4, 5, 6],
        [0, 1, 2, 2, 3, 3, 4, 5, 6],
        [0, 1, 2, 3, 2, 3, 4, 5, 6],
    ]
    assert delta == -2
    media = PromptMedia((), positions, delta)
    assert media.positions_of(7, 11).tolist() == [[5, 6, 7, 8]] * 3
    assert media.positions_of(10, 12).tolist() == [[8, 9]] * 3


def test_positions_without_a_grid_are_the_cells():
    assert PromptMedia(()).positions_of(3, 6).tolist() == [[3, 4, 5]] * 3


def test_grids_that_do_not_fit_the_prompt_are_refused():
    square, single = TokenGrid(2, 2), TokenGrid(1, 1)
    for ids, grids in (([7, 7, 1], [square]), ([7, 1, 7, 7], [square]), ([1, 1], [single])):
        with pytest.raises(ValueError, match="not consecutive"):
            grid_positions(ids, [7], grids)


def test_a_video_has_its_times_as_positions():
    """Two times that are three positions apart, in two rows of one column; an image stands before it."""
    grids = [TokenGrid(1, 2), TokenGrid(2, 1, times=(0, 3))]
    positions, delta = grid_positions([1, 7, 7, 1, 8, 8, 8, 8, 1], [7, 8], grids)
    assert positions.tolist() == [
        [0, 1, 1, 3, 4, 4, 7, 7, 8],
        [0, 1, 1, 3, 4, 5, 4, 5, 8],
        [0, 1, 2, 3, 4, 4, 4, 4, 8],
    ]
    assert delta == 0
