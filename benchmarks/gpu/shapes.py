"""Published model configs, and tiny configs of the same families for machines without a GPU."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
HYBRID: Config = {
    "model_type": "qwen3_5_text",
    "rms_norm_eps": 1e-6,
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
    "head_dim": 256,
    "num_key_value_heads": 4,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "rope_parameters": ROPE,
}
QWEN35_4B = HYBRID | {
    "hidden_size": 2560,
    "num_hidden_layers": 32,
    "intermediate_size": 9216,
    "num_attention_heads": 16,
    "linear_num_value_heads": 32,
    "tie_word_embeddings": True,
}
QWEN35_27B = HYBRID | {
    "hidden_size": 5120,
    "num_hidden_layers": 64,
    "intermediate_size": 17408,
    "num_attention_heads": 24,
    "linear_num_value_heads": 48,
    "tie_word_embeddings": False,
}
MOE: Config = {
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
QWEN35_35B_A3B = (
    HYBRID
    | MOE
    | {
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "linear_num_value_heads": 32,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    }
)
QWEN35_122B_A10B = (
    HYBRID
    | MOE
    | {
        "hidden_size": 3072,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "linear_num_value_heads": 64,
        "moe_intermediate_size": 1024,
        "shared_expert_intermediate_size": 1024,
    }
)
QWEN3_4B: Config = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
SMOLLM2_135M: Config = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rope_theta": 1e5,
    "tie_word_embeddings": True,
}
TINY_HYBRID = HYBRID | {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}
TINY_MOE = TINY_HYBRID | {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "tie_word_embeddings": False,
}
TINY_DENSE = QWEN3_4B | {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}
# For checks on a GPU: layers as wide as the published ones, but few of them, and a small vocabulary.
SMALL: Config = {"num_hidden_layers": 4, "vocab_size": 8192}

# name -> (mlx-lm's module, config)
SHAPES: dict[str, tuple[str, Config]] = {
    "4b": ("qwen3_5", QWEN35_4B),
    "27b": ("qwen3_5", QWEN35_27B),
    "35b-a3b": ("qwen3_5_moe", QWEN35_35B_A3B),
    "122b-a10b": ("qwen3_5_moe", QWEN35_122B_A10B),
    "dense-4b": ("qwen3", QWEN3_4B),
    "default-shape": ("llama", SMOLLM2_135M),
    "small-4b": ("qwen3_5", QWEN35_4B | SMALL),
    "small-dense-4b": ("qwen3", QWEN3_4B | SMALL),
    "tiny-4b": ("qwen3_5", TINY_HYBRID | {"tie_word_embeddings": True}),
    "tiny-27b": ("qwen3_5", TINY_HYBRID | {"tie_word_embeddings": False}),
    "tiny-35b-a3b": ("qwen3_5_moe", TINY_MOE),
    "tiny-dense-4b": ("qwen3", TINY_DENSE),
}
