"""Which rows a draft model follows: those whose text it can read."""

from __future__ import annotations

import pytest
from fake_runner import VOCAB_SIZE
from scheduler_harness import FakeText

from outrider.config import EngineConfig
from outrider.engine.sequence import Sequence
from outrider.engine.validation import ModelFacts, RequestValidator
from outrider.grammar.compiler import GrammarCompiler
from outrider.prompt_media import PromptMedia
from outrider.request import DraftDepth, Request, SamplingParams
from outrider.speculate.ngram import NgramDrafter

FACTS = ModelFacts(
    "m", VOCAB_SIZE, 1000, frozenset(), "model", reads_images=True, draft_model="d", draft_context=100
)
IMAGES = PromptMedia(())


def sequence(
    num_prompt: int, depth: DraftDepth, media: PromptMedia | None = None, facts: ModelFacts = FACTS
) -> Sequence:
    validator = RequestValidator(
        EngineConfig(), facts, 1000, lambda request: FakeText(), GrammarCompiler(lambda: None), str
    )
    params = SamplingParams(max_tokens=9, draft_depth=depth)
    return validator.new_sequence(validator.validate(Request("r", (1,) * num_prompt, params, media=media)))


@pytest.mark.parametrize("depth", [3, "auto"])
def test_a_draft_model_follows_texts_that_it_can_read(depth: DraftDepth) -> None:
    row = sequence(20, depth)
    assert row.feeds_head
    assert row.num_ahead == 0  # its cells depend on their own tokens, as the trunk's do
    assert row.drafting.drafter is None
    assert (row.drafting.lookup is not None) == (depth == "auto")


@pytest.mark.parametrize(("num_prompt", "media"), [(20, IMAGES), (95, None), (500, None)])
def test_rows_that_it_cannot_read_look_their_drafts_up(num_prompt: int, media: PromptMedia | None) -> None:
    fixed, auto = (sequence(num_prompt, depth, media) for depth in (3, "auto"))
    assert not fixed.feeds_head
    assert not auto.feeds_head
    assert isinstance(fixed.drafting.drafter, NgramDrafter)
    assert auto.drafting.drafter is None
    assert isinstance(auto.drafting.lookup, NgramDrafter)
    assert fixed.has_head_cells  # in one tree of prefixes with the rows that draft


def test_a_row_without_drafts_shares_its_prefix_with_rows_that_draft() -> None:
    row = sequence(20, 0)
    assert not row.feeds_head
    assert row.has_head_cells
    assert row.keys(0, 20) == sequence(20, 3).keys(0, 20)


def test_it_does_so_too_where_a_head_is_never_paused() -> None:
    """As on GPUs."""
    on_gpu = ModelFacts("m", VOCAB_SIZE, 1000, frozenset(), "mtp", head_layers=1, can_pause_head=False)
    plain, drafting = (sequence(20, depth, facts=on_gpu) for depth in (0, "auto"))
    assert plain.drafting.stores_head_inputs
    assert plain.keys(0, 19) == drafting.keys(0, 19)
    assert not drafting.drafting.may_pause_head


def test_a_row_shares_nothing_with_a_drafter_that_cannot_catch_up() -> None:
    facts = ModelFacts("m", VOCAB_SIZE, 1000, frozenset(), "model", can_store_head_inputs=False)
    assert not sequence(20, 0, facts=facts).has_head_cells
