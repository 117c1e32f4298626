"""The options of `outrider serve` that belong to one model, as the objects that are built from them."""

from __future__ import annotations

import logging
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from outrider.cli.adapters import max_adapters
from outrider.config import EngineConfig, InvalidConfig
from outrider.request import InvalidRequest, SamplingDefaults

if TYPE_CHECKING:
    from outrider.chat.formats.tool_format import ToolFormat
    from outrider.engine.engine import Engine
    from outrider.media.limits import MediaLimits

log = logging.getLogger(__name__)


def engine_config(options: dict[str, Any]) -> EngineConfig:
    """--mtp narrows --drafter. `check_drafter` checks `--mtp on` once the model is loaded."""
    mtp, drafter = options["mtp"], options["drafter"]
    if mtp in ("on", "wanted") and drafter not in ("auto", "mtp"):
        raise InvalidConfig(
            f"--mtp {mtp} and --drafter {drafter} contradict each other: give only one of them"
        )
    if mtp == "off" and drafter == "mtp":
        raise InvalidConfig("--mtp off and --drafter mtp contradict each other: give only one of them")
    if mtp == "off" and options["head"] is not None:
        raise InvalidConfig("--mtp off and --head contradict each other: give only one of them")
    if options["draft_model"] is not None and (mtp in ("on", "wanted") or drafter != "auto"):
        given = f"--mtp {mtp}" if mtp in ("on", "wanted") else f"--drafter {drafter}"
        raise InvalidConfig(f"{given} and --draft-model contradict each other: give only one of them")
    if mtp == "off" and drafter == "auto" and options["draft_model"] is None:
        drafter = "none"
    if options["no_prefix_cache"] and (options["prefix_cache_bytes"] or options["prefix_cache_dir"]):
        raise InvalidConfig(
            "--no-prefix-cache contradicts --prefix-cache-bytes (--cache-memory-mb) and --prefix-cache-dir: "
            "give one or the others"
        )
    disk_bytes = options["prefix_cache_disk_bytes"]
    if disk_bytes is not None and options["prefix_cache_dir"] is None:
        raise InvalidConfig("--prefix-cache-disk-bytes needs --prefix-cache-dir, the folder that it limits")
    depth = {} if options["draft_depth"] is None else {"auto_depth": options["draft_depth"]}
    return EngineConfig(
        max_rows=options["max_rows"],
        max_context=options["max_context"],
        memory_budget_bytes=options["memory_budget"],
        prefill_step_size=options["prefill_step_size"],
        max_stall_ms=options["max_stall_ms"],
        cache_layout=options["cache_layout"],
        kv_bits=options["kv_bits"],
        drafter=drafter,
        prefix_cache_bytes=0 if options["no_prefix_cache"] else options["prefix_cache_bytes"],
        prefix_cache_dir=options["prefix_cache_dir"],
        prefix_cache_disk_bytes=EngineConfig.prefix_cache_disk_bytes if disk_bytes is None else disk_bytes,
        image_cache_bytes=options["image_cache"],
        max_adapters=max_adapters(options),
        adapter_memory_bytes=options["adapter_memory"],
        rank_head=options["rank_head"],
        **depth,
    )


def check_drafter(options: dict[str, Any], engine: Engine) -> None:
    """Warn, or refuse to start, if the loaded model has no drafter although the options ask for one."""
    facts = engine.facts
    if facts.drafter != "mtp" and options["mtp"] in ("on", "wanted"):
        problem = (
            f"--mtp {options['mtp']} needs an MTP head, and {facts.name} has none that can be used, neither "
            "in its checkpoint nor in a file beside it, such as mtp/weights.safetensors. Pass --head FILE, "
            "extract a head from the original checkpoint with `outrider mtp extract`, train one with "
            "`outrider mtp train`, or use --drafter ngram."
        )
        if options["mtp"] == "on":
            raise InvalidConfig(f"{problem} Or use --mtp auto.")
        log.warning("%s Answering without drafts.", problem)
        return
    if options["draft_depth"] and facts.drafter == "none":
        raise InvalidConfig(
            f"--draft-depth {options['draft_depth']} needs a drafter, and {facts.name} has none: "
            "pass --head FILE, --draft-model MODEL or --drafter ngram, or use --draft-depth auto."
        )


def sampling_defaults(options: dict[str, Any]) -> SamplingDefaults:
    """The values of the flags. Raises InvalidConfig, which names the flag."""
    names = [field.name for field in fields(SamplingDefaults)]
    values = {name: options[f"default_{name}"] for name in names}
    for name, value in values.items():
        try:
            SamplingDefaults(**{name: value})
        except InvalidRequest as error:
            raise InvalidConfig(f"--default-{name.replace('_', '-')}: {error}") from None
    return SamplingDefaults(**values)


def media_limits(options: dict[str, Any]) -> MediaLimits:
    from outrider.media.limits import MediaLimits

    return MediaLimits(
        max_image_bytes=options["max_image_bytes"],
        max_image_pixels=options["max_image_pixels"],
        max_images=options["max_images"],
        max_frames=options["max_frames"],
        max_video_frames=options["max_video_frames"],
        fetch_total_s=options["fetch_timeout"],
        fetch_timeout_s=min(options["fetch_timeout"], 10.0),
        allow_private_urls=options["allow_private_urls"],
        local_folder=options["allow_local_media"],
    )


def tool_format(options: dict[str, Any]) -> ToolFormat | None:
    """The format that --tool-call-parser names; None without the flag: the chat template is to show it."""
    if (name := options["tool_call_parser"]) is None:
        return None
    from outrider.chat.formats import tool_format_named

    return tool_format_named(name)
