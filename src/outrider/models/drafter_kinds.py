"""Published drafters that are neither models by themselves nor MTP heads, recognised by their config.json.

They read states of the model that they draft for. Outrider does not serve them yet: it says what they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

EAGLE_3 = "an EAGLE-3 drafter (it reads hidden states of three layers of its model)"
EAGLE = "an EAGLE drafter (it reads hidden states of its model)"
DFLASH = "a DFlash drafter (it fills a block of masked tokens, given hidden states of its model)"
GEMMA_ASSISTANT = "a Gemma 4 assistant (it attends to keys and values of its model)"
SPECULATOR = "a speculator (it reads hidden states of its model)"

# LlamaForCausalLMEagle3, Eagle3LlamaForCausalLM, EagleSpeculator. Not the vision models that are named Eagle.
EAGLE_NAME = re.compile(
    r"^eagle(3?).*(?:forcausallm|speculator|draftmodel)|forcausallmeagle(3?)$|^eagle(3?)$"
)


def drafter_kind(config: Mapping[str, Any]) -> str | None:
    """What a folder with this config.json is, with an article; None: no such drafter."""
    for name in _names(config):
        if (eagle := EAGLE_NAME.search(name)) is not None:
            return EAGLE_3 if "3" in eagle.groups() else EAGLE
        if "dflash" in name:
            return DFLASH
        if re.match(r"gemma4(?:unified)?assistant", name):
            return GEMMA_ASSISTANT
    if "dflash_config" in config:
        return DFLASH
    return SPECULATOR if "speculators_model_type" in config else None


def _names(config: Mapping[str, Any]) -> list[str]:
    """What the config calls itself, in small letters, without underscores."""
    architectures = config.get("architectures")
    named = architectures if isinstance(architectures, list) else []
    given = [config.get("speculators_model_type"), *named, config.get("model_type")]
    return [name.lower().replace("_", "") for name in given if isinstance(name, str)]
