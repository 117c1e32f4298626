"""What a request did, for its line in the access log: prompt, cache, images, times, tokens, drafts.

No text of a prompt or an answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.engine.sequence import Stats

if TYPE_CHECKING:
    from outrider.api.answers import Answers


def summary_of(answers: Answers) -> dict[str, Any]:
    """The fields of the log entry: sums over all answers of the request, and the times of its first answer.

    An answer that was abandoned has tokens and no figures of its steps.
    """
    finished = [choice.finished for choice in answers.choices if choice.finished is not None]
    stats = [each.stats for each in finished]
    num_tokens, num_images = answers.num_generated, answers.num_images
    found: dict[str, Any] = {
        "api": answers.api,
        "model": answers.model,
        "answers": len(answers.choices),
        "finish": sorted({each.reason for each in finished}) or ["abandoned"],
        "prompt_tokens": answers.choices[0].num_prompt,
        "prompt_tokens_done": answers.num_prefilled(0),
        "cached_tokens": sum(one.num_cached for one in stats),
        "skipped_tokens": sum(one.num_skipped for one in stats),
        "images": num_images,
        "tokens": num_tokens,
        "reasoning_tokens": sum(each.usage.num_reasoning for each in finished),
        "drafted_tokens": sum(sum(one.drafted) for one in stats),
        "accepted_tokens": sum(sum(one.accepted) for one in stats),
        "preemptions": sum(one.preemptions for one in stats),
        "prepare_s": round(answers.started_s - answers.arrived_s, 6),
    }
    if steps := sum(one.steps for one in stats):
        found |= {"steps": steps, "stride": round(sum(one.num_generated for one in stats) / steps, 3)}
    return found | (_times(stats[0]) if stats else {})


def _times(stats: Stats) -> dict[str, float]:
    found = {}
    if stats.queue_s is not None:
        found["queue_s"] = round(stats.queue_s, 6)
        if stats.ttft_s is not None:
            found["prompt_s"] = round(stats.ttft_s - stats.queue_s, 6)
    return found


def embedding_summary(api: str, model: str, num_inputs: int, num_tokens: int) -> dict[str, Any]:
    """The fields of the log entry of an embeddings or rerank request."""
    return {"api": api, "model": model, "inputs": num_inputs, "prompt_tokens": num_tokens}


def text_of(summary: dict[str, Any]) -> str:
    """The summary in a few words, for a line of text."""
    if "inputs" in summary:
        return f"{summary['inputs']} inputs, {summary['prompt_tokens']} tokens"
    parts = [f"prompt {summary['prompt_tokens']} tokens"]
    if summary["cached_tokens"]:
        parts[0] += f" ({summary['cached_tokens']} cached)"
    if summary["skipped_tokens"]:
        parts[0] += f" ({summary['skipped_tokens']} skipped)"
    if summary["images"]:
        parts.append(f"{summary['images']} images")
    for name, word in (("queue_s", "queued"), ("prompt_s", "prompt read in")):
        if name in summary:
            parts.append(f"{word} {summary[name] * 1000:.0f} ms")
    answer = f"answer {summary['tokens']} tokens"
    if summary["reasoning_tokens"]:
        answer += f" ({summary['reasoning_tokens']} reasoning)"
    parts.append(answer)
    if "stride" in summary:
        parts.append(f"stride {summary['stride']:.2f}")
    if summary["drafted_tokens"]:
        parts.append(f"drafts {summary['accepted_tokens']}/{summary['drafted_tokens']}")
    if summary["preemptions"]:
        parts.append(f"{summary['preemptions']} preemptions")
    return ", ".join([*parts, "/".join(summary["finish"])])
