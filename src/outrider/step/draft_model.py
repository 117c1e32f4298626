"""The draft model as a drafter: a smaller model of the same vocabulary reads the row's tokens and goes on.

The draft model's cells run parallel to the trunk's: cell t holds x_t, in both. With `end` cells a row knows
x_0..x_end, and x_end is not in the trunk's cells yet. A pass of the draft model begins where the trunk's pass
began and ends with x_end. Then it feeds its own drafts, one by one:

    cells          0 ..... start-1 | start ........ end-1 | end      | end+1 ...
    trunk          final           | new                  |          |
    draft model    final           | new                  | x_end    | drafts
                                                           tentative: the next pass begins here

So a cell depends on its own token and those before it, a rollback is a smaller start, and what a paused draft
model has missed is in the row's history: nothing else is stored.

Recurrent states have no earlier version. If the draft model has such layers, x_end is fed in a pass of its
own, and the states of before are put back after the drafts. It is never paused: the states of a row that it
has not followed cannot be caught up with once they are cached.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import mlx.core as mx

from outrider.cache.placement import Placement
from outrider.models.trunk import Buffers, Trunk, TrunkCache
from outrider.step.batch import catch_up_width, lags_of
from outrider.step.deferred_head import FollowedRows, with_missed_tokens
from outrider.step.head_rows import Drafts, HeadRows


class DraftModelDrafter:
    def __init__(self, model: Trunk, vocab_size: int) -> None:
        """`vocab_size`: of the model that it drafts for. One of the two may have unused ids at its end."""
        self._model = model
        self._cache = TrunkCache(model.layout)
        self._num_ids = min(model.vocab_size, vocab_size)

    @property
    def may_run_on_all_rows(self) -> bool:
        return True

    def buffers(self) -> Iterator[Buffers]:
        return self._cache.buffers()

    def defer(self, hidden: mx.array, place: Placement) -> None:
        """Nothing to store: the draft model is fed tokens, and a row has its tokens."""

    def draft(self, followed: FollowedRows, capacity: int) -> Drafts | None:
        ends = followed.rows.starts + followed.rows.num_committed  # [rows] the cell of x_end
        one_if_fed = mx.minimum(followed.rows.num_fed, 1)
        out, rows = self._read(followed, capacity)
        if rows.depth == 0:
            return None
        states = self._cache.states()
        if self._model.has_states:
            last = mx.maximum(followed.rows.num_committed - 1, 0)[:, None]
            x_end = mx.take_along_axis(followed.next_ids, last, axis=1)
            out = self._hidden(x_end, rows.place(ends, one_if_fed, 1, capacity, further=1, commits_all=True))
        else:
            out = mx.take_along_axis(out, (ends - rows.starts)[:, None, None], axis=1)  # [rows, 1, H]
        drafts: list[mx.array] = []
        margins: list[mx.array] = []
        for number in range(1, rows.depth + 1):
            logits = self._model.logits(out)[..., : self._num_ids]
            rows.sample(logits, ends[:, None] + number, None, drafts, margins)
            if number < rows.depth:
                place = rows.place(
                    ends + number, one_if_fed, 1, capacity, further=number + 1, commits_all=True
                )
                out = self._hidden(drafts[-1], place)
        self._cache.put_states(states)
        found = mx.concatenate(margins, axis=1) if rows.with_margins else None
        return Drafts(mx.concatenate(drafts, axis=1), found)

    def _read(self, followed: FollowedRows, capacity: int) -> tuple[mx.array, HeadRows]:
        """Feed the tokens that are not read yet. Return the hidden states, and the rows as fed."""
        has_x_end = followed.rows.depth > 0 and not self._model.has_states
        token_ids, rows = _unread_tokens(followed, has_x_end)
        place = rows.place(
            rows.starts,
            rows.num_fed,
            token_ids.shape[1],
            capacity,
            further=1,
            commits_all=not any(row.num_drafts for row in followed.batch),
            any_new=any(row.start == 0 for row in followed.batch),
        )
        out = self._hidden(token_ids, place, followed.rows.num_committed * mx.minimum(rows.num_fed, 1))
        return out, rows

    def _hidden(
        self, token_ids: mx.array, place: Placement, num_committed: mx.array | None = None
    ) -> mx.array:
        """[rows, width, H] after these tokens. An id that the draft model does not know becomes its last.

        `num_committed`: the tokens after which recurrent states are kept; None: all that are fed.
        """
        known = mx.minimum(token_ids, self._model.vocab_size - 1)
        out = self._model.hidden(known, self._cache, place)
        self._cache.commit(place.num_fed if num_committed is None else num_committed)
        return out


def _unread_tokens(followed: FollowedRows, has_x_end: bool) -> tuple[mx.array, HeadRows]:
    """The tokens that the draft model has not read, from x_start on, and the rows with these tokens counted.

    Columns past the committed tokens hold rejected tokens or padding: cells that the next pass writes again.
    """
    newest, rows = followed.token_ids, followed.rows
    if has_x_end:
        newest = mx.concatenate([newest[:, :1], followed.next_ids], axis=1)
        rows = replace(rows, num_fed=rows.num_fed + mx.minimum(rows.num_fed, 1))
    head_lag = lags_of(followed.batch)
    if not head_lag.any():
        return newest, rows
    missed = mx.array(head_lag)
    rows = replace(rows, starts=rows.starts - missed, num_fed=rows.num_fed + missed)
    wide = catch_up_width(head_lag, newest.shape[1])
    return with_missed_tokens(followed.batch, newest, wide, offset=0), rows
