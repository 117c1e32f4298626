"""Tiny vision checkpoints with random weights, one for each served family, as mlx-vlm would save them."""

from __future__ import annotations

import copy
import importlib
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from tiny_models import (
    COMMON,
    END_ID,
    QUANTIZATIONS,
    SPECIAL_TOKENS,
    fill,
    is_quantized_name,
    own_quantization,
    write_tokenizer,
)

TILE_TOKENS = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
TILE_TOKENS += tuple(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4))
GRID_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
SPAN_TOKENS = ("<|image|>", "<|image>", "<image|>", "<|video|>")
SQUARE_TOKENS = ("<image_soft_token>", "<start_of_image>", "<end_of_image>")
VOCAB_SIZE = 144

TILE_TEMPLATE = (  # takes lists only, as SmolVLM's does
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
GRID_TEMPLATE = (  # takes strings and lists, as Qwen's do
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif part['type'] == 'video' %}"
    "<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

SQUARE_TEMPLATE = GRID_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", SQUARE_TOKENS[1])
SPAN_TEMPLATE = GRID_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", SPAN_TOKENS[0])

TEXT = {**COMMON, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 1024, "rope_theta": 10000.0}
TILE_CONFIG: dict[str, Any] = {
    "text_config": {**TEXT, "model_type": "llama"},
    "vision_config": {
        "hidden_size": 32,
        "num_attention_heads": 2,
        "patch_size": 4,
        "num_hidden_layers": 2,
        "intermediate_size": 48,
        "image_size": 16,
    },
    "scale_factor": 2,
    "image_token_id": len(SPECIAL_TOKENS),
    "vocab_size": VOCAB_SIZE,
}
QWEN_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "out_hidden_size": 64,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
}
QWEN_TOKENS = {
    "image_token_id": len(SPECIAL_TOKENS),
    "video_token_id": len(SPECIAL_TOKENS) + 1,
    "vision_start_token_id": len(SPECIAL_TOKENS) + 2,
    "vision_end_token_id": len(SPECIAL_TOKENS) + 3,
    "vocab_size": VOCAB_SIZE,
}
MROPE = {"type": "mrope", "rope_type": "default", "mrope_section": [2, 3, 3]}
QWEN2_TEXT = {**TEXT, "rope_scaling": MROPE, "tie_word_embeddings": False}
QWEN3_TEXT = {**TEXT, "rope_scaling": {"rope_type": "default", "type": "default", "mrope_section": [4, 2, 2]}}
QWEN35_TEXT = {
    **TEXT,
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "type": "default",
        "mrope_section": [2, 1, 1],
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
}
CONFIGS: dict[str, dict[str, Any]] = {
    "idefics3": {**TILE_CONFIG, "vision_config": {**TILE_CONFIG["vision_config"], "model_type": "idefics3"}},
    "smolvlm": {
        **TILE_CONFIG,
        "vision_config": {**TILE_CONFIG["vision_config"], "model_type": "smolvlm_vision"},
    },
    "qwen2_vl": {
        **QWEN_TOKENS,
        **QWEN2_TEXT,
        "text_config": {**QWEN2_TEXT, "model_type": "qwen2_vl"},
        "vision_config": {**QWEN_VISION, "model_type": "qwen2_vl", "embed_dim": 32, "hidden_size": 64},
    },
    "qwen2_5_vl": {
        **QWEN_TOKENS,
        **QWEN2_TEXT,
        "text_config": {**QWEN2_TEXT, "model_type": "qwen2_5_vl"},
        "vision_config": {
            **QWEN_VISION,
            "model_type": "qwen2_5_vl",
            "window_size": 16,
            "tokens_per_second": 1,
            "fullatt_block_indexes": [1],
        },
    },
    "qwen3_vl": {
        **QWEN_TOKENS,
        "text_config": {**QWEN3_TEXT, "model_type": "qwen3_vl_text"},
        "vision_config": {
            **QWEN_VISION,
            "model_type": "qwen3_vl",
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
    },
    "qwen3_vl_moe": {
        **QWEN_TOKENS,
        "text_config": {
            **QWEN3_TEXT,
            "model_type": "qwen3_vl_moe_text",
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
        },
        "vision_config": {
            **QWEN_VISION,
            "model_type": "qwen3_vl_moe",
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
    },
    "qwen3_5": {
        **QWEN_TOKENS,
        "text_config": {**QWEN35_TEXT, "model_type": "qwen3_5_text"},
        "vision_config": {
            **QWEN_VISION,
            "model_type": "qwen3_5",
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [],
        },
    },
    "qwen3_5_moe": {
        **QWEN_TOKENS,
        "text_config": {
            **QWEN35_TEXT,
            "model_type": "qwen3_5_moe_text",
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
        "vision_config": {
            **QWEN_VISION,
            "model_type": "qwen3_5_moe",
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [],
        },
    },
}
SLIDING, FULL = "sliding_attention", "full_attention"
GEMMA4_TEXT = {
    **TEXT,
    "model_type": "gemma4_text",
    "num_hidden_layers": 5,
    "num_kv_shared_layers": 2,
    "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL],
    "sliding_window": 12,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "use_bidirectional_attention": "vision",
    "tie_word_embeddings": True,
    "rope_parameters": {
        FULL: {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
        SLIDING: {"rope_theta": 1e4, "rope_type": "default"},
    },
}
CONFIGS["gemma4"] = {
    "image_token_id": len(SPECIAL_TOKENS),
    "video_token_id": len(SPECIAL_TOKENS) + 3,
    "vocab_size": VOCAB_SIZE,
    "text_config": GEMMA4_TEXT,
    "vision_config": {
        "model_type": "gemma4_vision",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 16,
        "patch_size": 4,
        "pooling_kernel_size": 2,
        "position_embedding_size": 64,
        "default_output_length": 20,
    },
}
GEMMA3_TEXT = {
    **TEXT,
    "model_type": "gemma3_text",
    "num_hidden_layers": 4,
    "sliding_window": 12,
    "sliding_window_pattern": 2,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "query_pre_attn_scalar": 16,
    "mm_tokens_per_image": 16,
}
CONFIGS["gemma3"] = {
    "image_token_index": len(SPECIAL_TOKENS),
    "mm_tokens_per_image": 16,
    "hidden_size": 64,  # published configs have none, and mlx-vlm takes 2048 then
    "pad_token_id": VOCAB_SIZE - 1,  # mlx-vlm's embeddings of it are zeros
    "vocab_size": VOCAB_SIZE,
    "text_config": GEMMA3_TEXT,
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "patch_size": 4,
        "image_size": 32,
    },
}
TILED = ("idefics3", "smolvlm")
SPANNED = ("gemma4", "gemma3")
FAMILIES = tuple(CONFIGS)
SHOWN = {  # what the template writes for an image
    **dict.fromkeys(FAMILIES, "<|vision_start|><|image_pad|><|vision_end|>"),
    **dict.fromkeys(TILED, "<image>"),
    "gemma4": SPAN_TOKENS[0],
    "gemma3": SQUARE_TOKENS[1],
}


def vision_config(family: str) -> dict[str, Any]:
    return {"model_type": family, "eos_token_id": END_ID, **copy.deepcopy(CONFIGS[family])}


def vision_model(family: str) -> nn.Module:
    """mlx-vlm's own model: the reference."""
    from mlx_vlm.utils import update_module_configs

    package = importlib.import_module(f"mlx_vlm.models.{family}")
    config = vision_config(family)
    settings = update_module_configs(
        package.ModelConfig.from_dict(config), package, config, ["text", "vision"]
    )
    model: nn.Module = package.Model(settings)
    model.eval()
    fill(model, zlib.crc32(family.encode()))
    return model


def write_vision_checkpoint(folder: Path, name: str) -> nn.Module:
    """A folder as mlx-vlm saves it: config, weights, tokenizer, processor. Returns mlx-vlm's own model.

    `name` is a family, or that of a model whose language part is quantised: "smolvlm-4bit".
    """
    family = name.rpartition("-")[0] if is_quantized_name(name) else name
    model, config = vision_model(family), vision_config(family)
    if is_quantized_name(name):
        config["quantization"] = quantize_language_model(model, name.rpartition("-")[2])
    folder.mkdir(parents=True, exist_ok=True)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    if family in TILED:
        write_tokenizer(folder, (*SPECIAL_TOKENS, *TILE_TOKENS), TILE_TEMPLATE)
        picture: dict[str, Any] = {
            "image_processor_type": "Idefics3ImageProcessor"
            if family == "idefics3"
            else "SmolVLMImageProcessor",
            "do_image_splitting": True,
            "size": {"longest_edge": 32},
            "max_image_size": {"longest_edge": 16},
        }
        (folder / "processor_config.json").write_text(json.dumps({"image_seq_len": 4}))
    elif family == "gemma3":
        names = dict(zip(("image_token", "boi_token", "eoi_token"), SQUARE_TOKENS, strict=True))
        write_tokenizer(
            folder, (*SPECIAL_TOKENS, *SQUARE_TOKENS), SQUARE_TEMPLATE, extra_special_tokens=names
        )
        picture = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 32, "width": 32}}
        (folder / "processor_config.json").write_text(json.dumps({"image_seq_length": 16}))
    elif family in SPANNED:
        names = dict(zip(("image_token", "boi_token", "eoi_token"), SPAN_TOKENS, strict=False))
        write_tokenizer(folder, (*SPECIAL_TOKENS, *SPAN_TOKENS), SPAN_TEMPLATE, extra_special_tokens=names)
        picture = {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 20}
    else:
        write_tokenizer(folder, (*SPECIAL_TOKENS, *GRID_TOKENS), GRID_TEMPLATE)
        picture = {
            "patch_size": 4,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "min_pixels": 64,
            "max_pixels": 1024,
        }
        video = {**picture, "max_pixels": 8192, "fps": 2, "min_frames": 4, "max_frames": 12}
        (folder / "video_preprocessor_config.json").write_text(json.dumps(video))
    (folder / "preprocessor_config.json").write_text(json.dumps(picture))
    return model


def quantize_language_model(model: nn.Module, quantization: str) -> dict[str, Any]:
    """Returns what config.json says."""
    how = QUANTIZATIONS[quantization]
    own: dict[str, bool | dict[str, int]] = {}

    def format_of(path: str, layer: nn.Module) -> bool | dict[str, int]:
        if not hasattr(layer, "to_quantized"):
            return False
        found = own_quantization(quantization, path, layer)
        if found is not True:
            own[f"language_model.{path}"] = found
        return found

    nn.quantize(model.language_model, **how, class_predicate=format_of)
    return {**how, **own}


def reference_inputs(
    folder: Path, family: str, text: str, pictures: Sequence[np.ndarray]
) -> dict[str, mx.array]:
    """What mlx-vlm's own processor makes of a rendered conversation and its pictures."""
    from PIL import Image

    from outrider.models.vision.encoder import _load_processor
    from outrider.models.vision.families import SUPPORTED

    processor = _load_processor(folder, SUPPORTED[family])
    images = [Image.fromarray(pixels) for pixels in pictures]
    found = processor(text=[text], images=[images] if family in TILED else images)
    return {
        name: value if isinstance(value, list) else mx.array(value)  # a list: images of different sizes
        for name, value in dict(found).items()
        if name != "attention_mask"
    }


def reference_video_inputs(
    folder: Path, family: str, text: str, videos: Sequence[bytes], pictures: Sequence[np.ndarray] = ()
) -> dict[str, mx.array]:
    """What mlx-vlm makes of a rendered conversation with videos: it samples and decodes their frames too."""
    from mlx_vlm.utils import prepare_inputs
    from PIL import Image

    from outrider.models.vision.encoder import _load_processor
    from outrider.models.vision.families import SUPPORTED

    files = [folder / f"video_{number}.mp4" for number in range(len(videos))]
    for file, data in zip(files, videos, strict=True):
        file.write_bytes(data)
    found = prepare_inputs(
        _load_processor(folder, SUPPORTED[family]),
        images=[Image.fromarray(pixels) for pixels in pictures] or None,
        videos=[str(file) for file in files],
        prompts=[text],
    )
    names = ("input_ids", "pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
    return {name: found[name] for name in names if name in found}


def square_logits(model: nn.Module, inputs: dict[str, mx.array], is_causal: bool = False) -> mx.array:
    """Gemma 3: mlx-vlm's layers under the masks of Hugging Face's code.  [1, tokens, vocab]

    mlx-vlm's own forward pass lets all tokens of the prompt attend to each other.
    """
    token_ids, text = inputs["input_ids"], model.language_model
    found = model.get_input_embeddings(token_ids, inputs["pixel_values"], mask=mx.ones_like(token_ids))
    is_image = np.array(token_ids[0]) == model.config.image_token_index
    image = np.cumsum(np.diff(is_image, prepend=False)) * is_image  # the same number for all of an image
    distance = np.subtract.outer(np.arange(len(image)), np.arange(len(image)))
    shared = (image[:, None] == image) & is_image & (not is_causal)
    masks = [mx.array((distance >= 0) & (distance < most) | shared)[None, None] for most in (12, len(image))]
    hidden = found.inputs_embeds * 8  # the root of the width
    for number, layer in enumerate(text.model.layers):
        hidden = layer(hidden, masks[number % 2], None)
    return text.lm_head(text.model.norm(hidden))


def reference_logits(model: nn.Module, inputs: dict[str, mx.array]) -> mx.array:
    """mlx-vlm's logits for a prompt with pictures.  [1, tokens, vocab]"""
    if hasattr(model, "config") and model.config.model_type == "gemma3":
        return square_logits(model, inputs)
    _forget_positions(model)
    token_ids = inputs["input_ids"]
    rest = {name: value for name, value in inputs.items() if name != "input_ids"}
    return model(token_ids, rest.pop("pixel_values", None), **rest).logits


def reference_tokens(model: nn.Module, inputs: dict[str, mx.array], num_tokens: int) -> list[int]:
    """mlx-vlm's greedy answer, with its own caches and position deltas."""
    if hasattr(model, "config") and model.config.model_type == "gemma3":
        return _square_tokens(model, inputs, num_tokens)
    _forget_positions(model)
    cache = (
        model.language_model.make_cache()
        if hasattr(model.language_model, "make_cache")
        else [importlib.import_module("mlx_vlm.models.cache").KVCache() for _ in model.layers]
    )
    token_ids = inputs["input_ids"]
    rest = {name: value for name, value in inputs.items() if name != "input_ids"}
    logits = model(token_ids, rest.pop("pixel_values", None), cache=cache, **rest).logits
    found = []
    for _ in range(num_tokens):
        token = int(mx.argmax(logits[0, -1]))
        found.append(token)
        logits = model.language_model(mx.array([[token]]), cache=cache).logits
    return found


def _forget_positions(model: nn.Module) -> None:
    """Before a prompt with videos: mlx-vlm forgets those of the prompt before only if there are images."""
    for name in ("_position_ids", "_rope_deltas"):
        if getattr(model.language_model, name, None) is not None:
            setattr(model.language_model, name, None)


def _square_tokens(model: nn.Module, inputs: dict[str, mx.array], num_tokens: int) -> list[int]:
    """The greedy answer, each token from a pass over all tokens before it."""
    ids = inputs["input_ids"]
    for _ in range(num_tokens):
        token = mx.argmax(square_logits(model, {**inputs, "input_ids": ids})[:, -1:], axis=-1)
        ids = mx.concatenate([ids, token.astype(ids.dtype)], axis=1)
    found: list[int] = ids[0, -num_tokens:].tolist()
    return found
