"""The results of a run: for the terminal, and for the metadata of the head file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from outrider.train.evaluate import Acceptance


@dataclass(frozen=True)
class Figures:
    """Measured on held-out exchanges: greedy answers without endless loops."""

    steps: int
    num_targets: int  # trained on; a target of a second epoch counts again
    trained_s: float
    num_held_out: int
    at_start: Acceptance
    whole_vocabulary: Acceptance
    draft_vocabulary: Acceptance  # the engine drafts from this vocabulary
    num_draft_ids: int | None  # None: all
    quantized: str | None = None  # for people: format and sizes

    def metadata(self) -> dict[str, str]:
        """As strings: safetensors stores no other metadata."""
        figures = {
            "training_steps": self.steps,
            "training_targets": self.num_targets,
            "held_out_exchanges": self.num_held_out,
            "held_out_steps": self.draft_vocabulary.steps,
            "tokens_per_step": round(self.draft_vocabulary.tokens_per_step, 3),
            "acceptance_rates": _rounded(self.draft_vocabulary),
            "acceptance_rates_whole_vocabulary": _rounded(self.whole_vocabulary),
        }
        return {"figures": json.dumps(figures)}


def render(figures: Figures, path: Path) -> str:
    vocabulary = "the whole vocabulary"
    rows = [("at the start", figures.at_start), ("now", figures.draft_vocabulary)]
    if figures.num_draft_ids is not None:
        vocabulary = f"the {figures.num_draft_ids:,} most frequent ids"
        rows.append(("now, from the whole vocabulary", figures.whole_vocabulary))
    width = max(len(name) for name, _ in rows)
    shares = [
        f"  {name:<{width}}  {' '.join(f'{share:4.0%}' for share in one.acceptance_rates)}, "
        f"{one.tokens_per_step:.2f} tokens a step"
        for name, one in rows
    ]
    trained = timedelta(seconds=round(figures.trained_s))
    lines = [
        f"Trained: {figures.steps:,} steps, {figures.num_targets:,} targets, {trained}.",
        f"Accepted drafts on {figures.num_held_out} held-out answers (greedy, loops cut), by position,",
        f"each given that the drafts before were accepted, drafted from {vocabulary}:",
        *shares,
        *([figures.quantized] if figures.quantized else []),
        f"Written: {path} ({path.stat().st_size / 1e6:.1f} MB).",
    ]
    return "\n".join(lines)


def _rounded(acceptance: Acceptance) -> list[float]:
    return [round(share, 4) for share in acceptance.acceptance_rates]
