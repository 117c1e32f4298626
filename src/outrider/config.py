"""The operator's settings of the engine. Those of the HTTP server are in `outrider.api.settings`. No MLX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from outrider.request import MAX_DEPTH, DraftDepth, is_int

DrafterName = Literal["auto", "mtp", "ngram", "none"]
DRAFTERS: tuple[DrafterName, ...] = ("auto", "mtp", "ngram", "none")
GenerationConfigSource = Literal["auto", "none"]
GENERATION_CONFIGS: tuple[GenerationConfigSource, ...] = ("auto", "none")  # auto: the model's own file
CacheLayout = Literal["auto", "blocks", "slots"]
CACHE_LAYOUTS: tuple[CacheLayout, ...] = ("auto", "blocks", "slots")
RankHead = Literal["auto", "whole", "divided"]
RANK_HEADS: tuple[RankHead, ...] = ("auto", "whole", "divided")
DTYPES = ("auto", "float32", "bfloat16", "float16")  # of the weights
KV_BITS = (4, 8, 16, 32)
HEAD_BITS, HEAD_GROUP_SIZES = (4, 5, 6, 8), (32, 64, 128)  # in which `outrider mtp` writes quantised heads
DEFAULT_HEAD_GROUP_SIZE = 64  # as mlx-lm's
DEFAULT_MAX_ADAPTERS = 16  # where adapters are asked for; chosen by hand


class InvalidConfig(ValueError):
    """The engine cannot run with these settings. The message gives the reason and what to change."""


@dataclass(frozen=True)
class EngineConfig:
    """Limits and policies of one engine. None: the engine derives the value from model and machine."""

    # Maximum number of sequences decoded at once (vLLM: max_num_seqs). None: 16 on a CPU, else 16 to 64 by
    # memory and model.
    max_rows: int | None = None
    # Maximum number of tokens of a prompt and its answer (vLLM: max_model_len). None: the model's own limit.
    max_context: int | None = None
    # Memory for the KV caches of running sequences. None: a share of the free memory.
    memory_budget_bytes: int | None = None
    # Maximum number of prompt tokens computed in one step, over all sequences: the size of a prefill chunk.
    # (vLLM's max_num_batched_tokens also counts decode tokens.) None: up to 2048, by measured costs.
    prefill_step_size: int | None = None
    # Milliseconds that a step with prompt chunks may take while other sequences decode. Also, prompts then
    # get half of the time at most. 0: neither limit.
    max_stall_ms: int = 200
    # Bits of keys and values, also in cached prefixes (mlx-lm: kv_bits). 4, 8: quantised; 16: bfloat16; 32:
    # float32. None: those of the model's dtype; 16 for quantised models on CPUs, which compute in float32.
    kv_bits: int | None = None
    # Source of draft tokens for speculative decoding. "auto": the MTP head if the model has one, with n-gram
    # lookup beside it for requests of auto depth; else none.
    drafter: DrafterName = "auto"
    # Draft tokens per step for requests that do not set draft_depth (vLLM: num_speculative_tokens). "auto":
    # the engine chooses a depth for each step, from measured costs and acceptance rates.
    auto_depth: DraftDepth = "auto"
    # The KV caches hold a multiple of this many tokens per sequence. Chosen by hand.
    capacity_step: int = 256
    # How sequences keep their keys and values. "blocks": each has as many blocks as it needs. "slots": all
    # have as much room as the longest. "auto": blocks where attention reads them in place and as fast as
    # slots (native attention on CPUs, tensor cores on CUDA, quantised cells), else slots.
    cache_layout: CacheLayout = "auto"
    # Memory for cached prefixes, in addition to memory_budget_bytes. None: a quarter of the memory for
    # caches. 0: no prefix cache (vLLM: enable_prefix_caching=False).
    prefix_cache_bytes: int | None = None
    # Folder that stores cached prefixes across restarts. None: in memory only.
    prefix_cache_dir: str | None = None
    # Maximum size of that folder, over all models.
    prefix_cache_disk_bytes: int = 16 << 30
    # Memory for cached embeddings of images (vLLM: the encoder cache), in addition to the other caches.
    image_cache_bytes: int = 256 << 20
    # LoRA and DoRA adapters that may be loaded at once, for requests to name (vLLM: max_loras). 0: none.
    max_adapters: int = 0
    # Memory for them, in addition to the caches.
    adapter_memory_bytes: int = 1 << 30
    # Where the MTP head of a model on several ranks is. "whole": on rank 0. "divided": on all ranks. "auto":
    # what drafts faster, timed at the start.
    rank_head: RankHead = "auto"

    def __post_init__(self) -> None:
        _at_least("max_stall_ms", self.max_stall_ms, 0)
        _at_least("capacity_step", self.capacity_step, 16)
        _at_least("image_cache_bytes", self.image_cache_bytes, 1)
        _at_least("max_adapters", self.max_adapters, 0)
        _at_least("adapter_memory_bytes", self.adapter_memory_bytes, 1)
        _at_least("prefix_cache_disk_bytes", self.prefix_cache_disk_bytes, 1)
        optional = (("max_rows", 1), ("prefill_step_size", 1), ("max_context", 2), ("memory_budget_bytes", 1))
        for name, minimum in (*optional, ("prefix_cache_bytes", 0)):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), minimum)
        if self.kv_bits is not None and (not is_int(self.kv_bits) or self.kv_bits not in KV_BITS):
            known = ", ".join(map(str, KV_BITS))
            raise InvalidConfig(f"kv_bits must be one of {known}, or None, not {self.kv_bits!r}")
        if self.prefix_cache_dir is not None and not isinstance(self.prefix_cache_dir, str):
            raise InvalidConfig(f"prefix_cache_dir must be a path as text, not {self.prefix_cache_dir!r}")
        if self.prefix_cache_dir is not None and self.prefix_cache_bytes == 0:
            raise InvalidConfig(
                "prefix_cache_dir needs a prefix cache in memory, but prefix_cache_bytes is 0: change one"
            )
        is_constant = is_int(self.auto_depth) and 0 <= self.auto_depth <= MAX_DEPTH
        if self.auto_depth != "auto" and not is_constant:
            raise InvalidConfig(f'auto_depth must be "auto" or 0..{MAX_DEPTH}, not {self.auto_depth!r}')
        _one_of("drafter", self.drafter, DRAFTERS)
        _one_of("cache_layout", self.cache_layout, CACHE_LAYOUTS)
        _one_of("rank_head", self.rank_head, RANK_HEADS)


def _at_least(name: str, value: object, minimum: int) -> None:
    if not is_int(value) or value < minimum:
        raise InvalidConfig(f"{name} must be a whole number of at least {minimum}, not {value!r}")


def _one_of(name: str, value: object, names: tuple[str, ...]) -> None:
    if value not in names:
        raise InvalidConfig(f"{name} must be one of {', '.join(names)}, not {value!r}")
