"""`options` and `format` of Ollama's requests, and their translation into sampling parameters.

An option that changes the answer is honoured or refused. Options that only change the speed in Ollama have no
effect. Options that Ollama does not know are logged, as it does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field

from outrider.answer_form import Grammar
from outrider.api.errors import refused
from outrider.api.limits import STOP_SEQUENCES, AnyText, AtMost, JsonObject, check_stops
from outrider.api.request_fields import (
    RequestModel,
    SamplingFields,
    Whole,
    documented,
    sampling_params,
    schema_grammar,
)
from outrider.request import MAX_REPETITION_PENALTY, MIN_REPETITION_PENALTY, SamplingDefaults, SamplingParams

log = logging.getLogger(__name__)

NO_EFFECT = "No effect: it changes the speed in Ollama, not the answer"
RANDOM_SEED = -1  # Ollama's default: a fresh seed for each request
Format = Literal["", "json"] | JsonObject


class Options(RequestModel):
    temperature: float | None = documented(minimum=0, maximum=100)
    top_k: Whole | None = Field(None, description="0 or less: off")
    top_p: float | None = documented(exclusiveMinimum=0, maximum=1)
    min_p: float | None = documented(minimum=0, maximum=1)
    seed: Whole | None = documented("-1: a fresh one", minimum=-(2**63), exclusiveMaximum=2**64)
    num_predict: Whole | None = documented("Negative: up to the context", **{"not": {"const": 0}})
    stop: Annotated[list[AnyText], AtMost(STOP_SEQUENCES)] | None = None
    repeat_penalty: float | None = documented(
        "Over prompt and answer", minimum=MIN_REPETITION_PENALTY, maximum=MAX_REPETITION_PENALTY
    )
    presence_penalty: float | None = documented("Over the answer", minimum=-2, maximum=2)
    frequency_penalty: float | None = documented("Over the answer", minimum=-2, maximum=2)
    repeat_last_n: Whole | None = Field(
        None, description="-1: all tokens count; 0: no repeat_penalty. Others are refused with repeat_penalty"
    )

    num_ctx: Whole | None = Field(
        None, description="No effect: the operator sets the context (--max-context). See /api/ps"
    )
    typical_p: float | None = documented("Only 1 (off) is supported", enum=[1, None])
    tfs_z: float | None = documented("Only 1 (off) is supported", enum=[1, None])
    mirostat: Whole | None = documented("Only 0 (off) is supported", enum=[0, None])

    mirostat_tau: float | None = Field(None, description="No effect: belongs to mirostat")
    mirostat_eta: float | None = Field(None, description="No effect: belongs to mirostat")
    num_keep: Whole | None = Field(None, description="No effect: the context is never shifted")
    draft_num_predict: Whole | None = Field(None, description=NO_EFFECT)
    num_batch: Whole | None = Field(None, description=NO_EFFECT)
    num_gpu: Whole | None = Field(None, description=NO_EFFECT)
    main_gpu: Whole | None = Field(None, description=NO_EFFECT)
    num_thread: Whole | None = Field(None, description=NO_EFFECT)
    use_mmap: bool | None = Field(None, description=NO_EFFECT)


def options_params(
    options: Options | None,
    default_max_tokens: int | None,
    sampling: SamplingDefaults,
    *,
    logprobs: int | None,
    thinking: int | None = None,
    grammar: Grammar | None = None,
) -> SamplingParams:
    """`default_max_tokens`, `sampling`: for requests that leave the values out. Raises InvalidRequest.

    `grammar`: of a bare prompt. `thinking`: most tokens of reasoning.
    """
    options = options or Options.model_validate({})
    _check(options)
    given: dict[str, Any] = {
        "temperature": options.temperature,
        "top_k": None if options.top_k is None else max(0, options.top_k),
        "top_p": options.top_p,
        "min_p": options.min_p,
        "seed": None if options.seed == RANDOM_SEED else options.seed,
        "repetition_penalty": _repetition_penalty(options, sampling),
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
    }
    num_predict = options.num_predict
    return sampling_params(
        SamplingFields.model_validate(given),
        sampling,
        max_tokens=default_max_tokens if num_predict is None or num_predict < 0 else num_predict,
        stop=options.stop,
        logprobs=logprobs,
        grammar=grammar,
        thinking=thinking,
    )


def format_grammar(format_: Format | None) -> Grammar | None:
    if format_ in (None, ""):
        return None
    return Grammar("json_object") if isinstance(format_, str) else schema_grammar(format_ or {})


# By option: whether a value is supported, and the reason if it is not.
SUPPORTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "num_predict": (lambda value: value != 0, "0 would give no answer: send -1 for no limit, or 1 or more"),
    "typical_p": (lambda value: value == 1, "typical sampling is not supported: use top_p or min_p"),
    "tfs_z": (lambda value: value == 1, "tail-free sampling is not supported: use top_p or min_p"),
    "mirostat": (lambda value: value == 0, "not supported: use temperature and top_p"),
    "repeat_penalty": (
        lambda value: MIN_REPETITION_PENALTY <= value <= MAX_REPETITION_PENALTY,
        f"must be from {MIN_REPETITION_PENALTY} to {MAX_REPETITION_PENALTY}",
    ),
}


def _repetition_penalty(options: Options, sampling: SamplingDefaults) -> float | None:
    if options.repeat_last_n == 0:
        return 1.0
    penalty = options.repeat_penalty
    in_effect = sampling.params().repetition_penalty if penalty is None else penalty
    if options.repeat_last_n not in (None, -1) and in_effect != 1:
        raise refused(
            "options.repeat_last_n",
            f"{options.repeat_last_n} is not supported: repeat_penalty counts all tokens of the request. "
            "Send -1, or 0 for no penalty",
        )
    return penalty


def note_context(options: Options | None, max_context: int | None) -> None:
    """Log a num_ctx that cannot be had: Ollama too goes on with the context that the model has."""
    if options is None or options.num_ctx is None or max_context is None:
        return
    if options.num_ctx > max_context:
        text = "options.num_ctx is %d, and the context holds %d tokens: longer prompts are refused"
        log.info(text, options.num_ctx, max_context)


def _check(options: Options) -> None:
    check_stops("options.stop", options.stop)
    for name, (is_supported, reason) in SUPPORTED.items():
        value = getattr(options, name)
        if value is not None and not is_supported(value):
            raise refused(f"options.{name}", reason)
    if options.model_extra:
        names = ", ".join(repr(name[:40]) for name in list(options.model_extra)[:20])
        log.info("unknown options ignored: %s", names)
