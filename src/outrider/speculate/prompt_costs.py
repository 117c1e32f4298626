"""What a pass over prompt chunks costs on this machine: measured seconds, corrected by the passes that run.

    pass_s = (trunk_s(tokens) + pairs * pair_s) * exp(correction)

    tokens    that the pass feeds, and padding as far as it costs something; linear between measured sizes
    pairs     a fed token and a cell that was cached before the pass: attention grows with them

The time of a real pass changes the correction. There is one for each range of cells before the chunks, since
the cost of a cell is what a short measurement knows least.

    pass_bytes = tokens * token_bytes + pairs * pair_bytes + copied_bytes     tokens: all padding included

`copied_bytes` are counted, not measured: the dequantised weights of a wide pass, 0 in all other passes. Pure
Python.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from outrider.plan import is_wide_prompt_pass
from outrider.speculate.costs import clipped, interpolated, seconds_of

# Chosen by hand. tests/speculate/test_prompt_costs.py tests their effects.
GAIN = 0.4  # share of a pass's deviation by which the correction changes: chunks are few, and loads change
MAX_DEVIATION = 0.8  # log ratio: the most that one pass counts
MAX_LOSS = 1.03  # the best chunk is the smallest that costs at most this much more for each token


@dataclass(frozen=True)
class PromptShape:
    """What the cost of a pass over prompt chunks depends on."""

    rows: int = 0
    width: int = 0  # tokens of the longest chunk
    num_tokens: int = 0
    num_pairs: int = 0  # pairs of a fed token and a cell that was cached before

    def plus(self, size: int, num_cached: int) -> PromptShape:
        """With one more chunk, of a row that has `num_cached` cells."""
        return PromptShape(
            self.rows + 1,
            max(self.width, size),
            self.num_tokens + size,
            self.num_pairs + size * num_cached,
        )

    @property
    def num_padding(self) -> int:
        return self.rows * self.width - self.num_tokens


@dataclass(frozen=True)
class MeasuredPromptCosts:
    """The seconds that calibration measured, unchanged."""

    pass_s: Mapping[int, float]  # of one row's first chunk, by its tokens
    pair_s: float = 0.0
    token_bytes: float = 0.0  # memory that a pass computes with, for each token
    pair_bytes: float = 0.0  # the same for each pair: above 0 where attention stores its scores

    def as_json(self) -> dict[str, object]:
        return {
            "pass_s": [[size, s] for size, s in sorted(self.pass_s.items())],
            "pair_s": self.pair_s,
            "token_bytes": self.token_bytes,
            "pair_bytes": self.pair_bytes,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> MeasuredPromptCosts:
        """Raise KeyError, TypeError or ValueError for data that `as_json` cannot have made."""
        pass_s = {int(size): seconds_of(s) for size, s in data["pass_s"]}  # type: ignore[attr-defined]
        if not pass_s or min(pass_s) < 1 or min(pass_s.values()) <= 0:
            raise ValueError("the costs of prompts need at least one size, and times above 0")
        return cls(pass_s, *(seconds_of(data[name]) for name in ("pair_s", "token_bytes", "pair_bytes")))


class PromptCosts:
    """The cost of every pass over prompt chunks."""

    def __init__(
        self,
        measured: MeasuredPromptCosts | None = None,
        padding_share: float = 1.0,
        copied_bytes: int = 0,
        padded_width: Callable[[int], int] = lambda width: width,
    ) -> None:
        """Without a measurement the costs are unknown until the first pass has run, and linear from then on.

        `padding_share`: what padding costs, as a share of what a token costs. `copied_bytes`: dequantised
        weights of a wide pass (models/copied_weights.py). `padded_width`: the width of a pass, by that of its
        longest chunk.
        """
        self.measured = measured
        self.padding_share = padding_share
        self._copied_bytes = copied_bytes
        self._padded_width = padded_width
        pass_s = (
            measured.pass_s if measured is not None else {1: 1e-3, 2: 2e-3}
        )  # without: only the ratio counts
        self._sizes = sorted(pass_s)
        self._seconds = [pass_s[size] for size in self._sizes]
        self._corrections: dict[int, float] = {}  # log ratios, by range of cells
        self._last = 0.0  # the correction of the last pass: the first one of a new range

    @property
    def is_known(self) -> bool:
        return self.measured is not None or bool(self._corrections)

    @property
    def best_size(self) -> int | None:
        """The chunk for prompts that nobody waits for: the smallest of those that cost least for each token.

        None without a measurement.
        """
        if self.measured is None:
            return None
        per_token = {size: seconds / size for size, seconds in self.measured.pass_s.items()}
        return min(size for size, s in per_token.items() if s <= MAX_LOSS * min(per_token.values()))

    def num_charged(self, shape: PromptShape) -> float:
        """Tokens of a pass, with padding as far as it costs something."""
        return shape.num_tokens + self.padding_share * shape.num_padding

    def pass_s(self, shape: PromptShape) -> float:
        """Expected seconds; 0 while the costs are unknown."""
        if not self.is_known:
            return 0.0
        return self._uncorrected_s(shape) * math.exp(self._corrections.get(_range_of(shape), self._last))

    def pass_bytes(self, shape: PromptShape) -> float:
        """Memory that a pass computes with. Padding takes as much as tokens.

        Without a measurement, only the dequantised weights are known.
        """
        width = self._padded_width(shape.width)
        num_tokens = shape.rows * width
        num_bytes = float(self._copied_bytes) if is_wide_prompt_pass(num_tokens, width) else 0.0
        if self.measured is not None:
            num_bytes += num_tokens * self.measured.token_bytes + shape.num_pairs * self.measured.pair_bytes
        return num_bytes

    def observe(self, shape: PromptShape, seconds: float) -> None:
        """A pass of this shape took `seconds`."""
        ratio = math.log(max(seconds, 1e-6) / self._uncorrected_s(shape))
        if self.is_known:
            correction = self._corrections.get(_range_of(shape), self._last)
            ratio = correction + GAIN * clipped(ratio - correction, MAX_DEVIATION)
        self._last = self._corrections[_range_of(shape)] = ratio

    def _uncorrected_s(self, shape: PromptShape) -> float:
        pair_s = self.measured.pair_s if self.measured is not None else 0.0
        return self._trunk_s(shape) + shape.num_pairs * pair_s

    def _trunk_s(self, shape: PromptShape) -> float:
        """Beyond the largest measured size a token costs what it costs there."""
        num, largest = self.num_charged(shape), self._sizes[-1]
        if num > largest:
            return self._seconds[-1] * num / largest
        return interpolated(self._sizes, self._seconds, num)


def _range_of(shape: PromptShape) -> int:
    """0 for chunks behind fewer than 256 cells, 1 for fewer than 768, 2 for fewer than 1792, and so on."""
    return (1 + shape.num_pairs // (256 * max(1, shape.num_tokens))).bit_length() - 1
