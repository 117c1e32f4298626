"""Tiny models with random weights, one for each family, and checkpoint folders made of them.

A config is COMMON plus the family's own row; mlx-lm's ModelArgs pick out what they know. Windows, chunks and
top-k selections are small enough to bite within twenty tokens. Nothing is downloaded.
"""

from __future__ import annotations

import copy
import importlib
import json
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import quantize_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

VOCAB_SIZE = 113
WINDOW = 7
NUM_LAYERS = 3

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": NUM_LAYERS,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}

MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
ROUTED = {  # DeepSeek's names
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 2,
    "topk_group": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
LATENT = {  # multi-head latent attention
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
INDEXED = {"index_topk": 6, "index_n_heads": 8, "index_head_dim": 16}
YARN = {
    "type": "yarn",
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
LONGROPE = {
    "type": "longrope",
    "rope_type": "longrope",
    "original_max_position_embeddings": 16,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0 + 0.25 * i for i in range(8)],
}
SLIDING_AND_FULL = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": WINDOW,
}
ROPE_BY_LAYER_TYPE = {
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    }
}
GPT = {  # GPT-2's names
    "n_embd": 64,
    "n_head": 4,
    "n_layer": NUM_LAYERS,
    "n_inner": 96,
    "n_ctx": 256,
    "n_positions": 256,
    "layer_norm_epsilon": 1e-5,
}
GRANITE = {
    "logits_scaling": 4.0,
    "attention_multiplier": 0.3,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
}
GLM4_MOE = {**ROUTED, "partial_rotary_factor": 0.5, "use_qk_norm": True, "rope_scaling": None}

DELTA = {  # gated delta rule layers, every third layer attention
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 3,
    "partial_rotary_factor": 0.5,
}
SHARED_MOE = {**MOE, "shared_expert_intermediate_size": 32, "mlp_only_layers": [], "decoder_sparse_step": 1}
QWEN35_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}

TINY: dict[str, dict[str, Any]] = {
    "Klear": {**MOE, "n_shared_experts": 1, "mlp_only_layers": [0], "decoder_sparse_step": 1},
    "afmoe": {
        **MOE,
        **SLIDING_AND_FULL,
        "num_shared_experts": 1,
        "num_dense_layers": 1,
        "score_func": "sigmoid",
        "n_group": 2,
        "topk_group": 1,
    },
    "apertus": {"post_norm": False, "qk_norm": True, "attention_bias": True},
    "bailing_moe": {
        **MOE,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        "use_qkv_bias": True,
        "n_group": 2,
        "topk_group": 1,
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    },
    "bailing_moe_v3": {
        **MOE,
        **LATENT,
        "moe_shared_expert_intermediate_size": 32,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "layer_group_size": 3,
    },
    "cohere": {"use_qk_norm": True, "logit_scale": 0.25, "attention_bias": True},
    "cohere2": {"sliding_window": WINDOW, "sliding_window_pattern": 2},
    "dbrx": {
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 2,
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"clip_qkv": 8.0, "kv_n_heads": 2, "rope_theta": 10000.0},
    },
    "deepseek": {**ROUTED, "num_key_value_heads": 2},
    "deepseek_v2": {**ROUTED, **LATENT, "topk_method": "group_limited_greedy", "rope_scaling": YARN},
    "deepseek_v3": {**ROUTED, **LATENT, "rope_scaling": YARN},
    "deepseek_v32": {**ROUTED, **LATENT, **INDEXED},
    "dots1": {**ROUTED, "scoring_func": "noaux_tc"},
    "ernie4_5": {"use_bias": False},
    "ernie4_5_moe": {
        "use_bias": False,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 2,
        "moe_num_shared_experts": 1,
    },
    "exaone": {"num_layers": NUM_LAYERS, "layer_norm_epsilon": 1e-5},
    "exaone4": {"sliding_window": WINDOW, "sliding_window_pattern": "LLG", "rope_scaling": None},
    "exaone_moe": {
        **MOE,
        **SLIDING_AND_FULL,
        "num_shared_experts": 1,
        "is_moe_layer": [False, True, True],
        "n_group": 2,
        "topk_group": 1,
    },
    "falcon_h1": {
        "mamba_d_conv": 4,
        "mamba_d_head": 16,
        "mamba_d_ssm": 64,
        "mamba_d_state": 8,
        "mamba_expand": 1,
        "mamba_n_groups": 1,
        "mamba_n_heads": 4,
        "projectors_bias": False,
    },
    "gemma": {},
    "gemma3_text": {
        "query_pre_attn_scalar": 16.0,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
    },
    "gemma4_text": {  # the last two layers share the keys and values of the first three
        "num_hidden_layers": 5,
        "num_kv_shared_layers": 2,
        "layer_types": [
            "sliding_attention",
            "full_attention",
            "sliding_attention",
            "sliding_attention",
            "full_attention",
        ],
        "sliding_window": WINDOW,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "glm": {"attention_bias": True},
    "glm4": {"partial_rotary_factor": 0.5, "attention_bias": True},
    "glm4_moe": GLM4_MOE,
    "glm4_moe_lite": {**ROUTED, **LATENT},
    "glm_moe_dsa": {
        **ROUTED,
        **LATENT,
        **INDEXED,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "gpt2": GPT,
    "gpt_oss": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": WINDOW,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_scaling": YARN,
    },
    "gptj": {**GPT, "rotary_dim": 8},
    "granite": {**GRANITE, "tie_word_embeddings": True},
    "granitemoe": {**GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoehybrid": {
        **GRANITE,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
        "layer_types": ["mamba", "attention", "mamba"],
        "position_embedding_type": "rope",
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_d_conv": 4,
        "mamba_n_groups": 2,
        "mamba_proj_bias": False,
        "mamba_conv_bias": True,
        "time_step_limit": [0.0, 10.0],
    },
    "helium": {},
    "hunyuan": {
        **MOE,
        "moe_topk": 2,
        "num_shared_expert": 1,
        "use_mixed_mlp_moe": True,
        "use_qk_norm": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "rope_scaling": {"alpha": 50.0, "factor": 1.0, "type": "dynamic"},
        "tie_word_embeddings": True,
    },
    "hunyuan_v1_dense": {"rope_scaling": {"alpha": 50.0, "factor": 1.0, "type": "dynamic"}},
    "internlm2": {"bias": True},
    "internlm3": {"qkv_bias": True, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "iquestloopcoder": {"loop_num": 2, "loop_window_size": WINDOW},
    "kimi_linear": {
        **MOE,
        **LATENT,
        "linear_attn_config": {
            "kda_layers": [1, 3],
            "full_attn_layers": [2],
            "num_heads": 4,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
        },
        "model_max_length": 256,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    "laguna": {
        **MOE,
        **SLIDING_AND_FULL,
        **ROPE_BY_LAYER_TYPE,
        "num_attention_heads_per_layer": [4, 2, 4],
        "shared_expert_intermediate_size": 32,
    },
    "lfm2": {
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_ff_dim": 96,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1],
    },
    "lfm2_moe": {
        **MOE,
        "norm_eps": 1e-5,
        "num_dense_layers": 1,
        "use_expert_bias": True,
        "conv_bias": False,
        "conv_L_cache": 3,
        "full_attn_idxs": [1],
    },
    "llama": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "llama4_text": {"intermediate_size_mlp": 96, "no_rope_layers": [1, 1, 0], "use_qk_norm": True},
    "longcat_flash": {
        **LATENT,
        "attention_method": "MLA",
        "zero_expert_type": "identity",
        "zero_expert_num": 2,
        "ffn_hidden_size": 96,
        "moe_topk": 2,
        "expert_ffn_hidden_size": 32,
        "n_routed_experts": 4,
        "num_layers": 2,
        "routed_scaling_factor": 1.5,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
    },
    "mamba2": {
        "num_heads": 4,
        "state_size": 8,
        "conv_kernel": 4,
        "n_groups": 1,
        "expand": 1,
        "time_step_limit": [0.0, 10.0],
        "time_step_rank": 4,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
        "chunk_size": 8,
    },
    "mellum": {
        **MOE,
        **SLIDING_AND_FULL,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "mimo": {"num_nextn_predict_layers": 1},
    "mimo_v2_flash": {
        **ROUTED,
        "hybrid_layer_pattern": [1, 0, 1],
        "moe_layer_freq": [0, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": WINDOW,
        "n_shared_experts": None,
        "layernorm_epsilon": 1e-5,
        "swa_rope_theta": 5000.0,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "v_head_dim": 8,
        "swa_head_dim": 16,
        "swa_v_head_dim": 8,
        "partial_rotary_factor": 0.5,
        "attention_value_scale": 0.7,
    },
    "minicpm": {"dim_model_base": 16, "scale_depth": 1.4, "scale_emb": 3.0},
    "minicpm3": {
        **LATENT,
        "dim_model_base": 16,
        "scale_depth": 1.4,
        "scale_emb": 3.0,
        "rope_scaling": {
            "type": "longrope",
            "original_max_position_embeddings": 16,
            "short_factor": [1.0] * 4,
            "long_factor": [1.0, 1.5, 2.0, 2.5],
        },
    },
    "minimax": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 0,
        "rotary_dim": 8,
        "use_qk_norm": True,
    },
    "ministral3": {
        **SLIDING_AND_FULL,
        "rope_parameters": {
            **YARN,
            "rope_theta": 10000.0,
            "llama_4_scaling_beta": 0.3,
            "original_max_position_embeddings": 8,
        },
    },
    "mistral4": {
        **ROUTED,
        **LATENT,
        "head_dim": None,
        "rope_parameters": {
            **YARN,
            "rope_theta": 10000.0,
            "llama_4_scaling_beta": 0.3,
            "original_max_position_embeddings": 8,
        },
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "muse_glimmer": SLIDING_AND_FULL,
    "nanbeige": {"num_loops": 2},
    "nanochat": {},
    "nemotron": {"hidden_act": "relu2", "norm_eps": 1e-5},
    "nemotron-nas": {
        "num_hidden_layers": 3,
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 0.5}},
            {"attention": {"n_heads_in_group": 4}, "ffn": {"replace_with_linear": True}},
        ],
    },
    "nemotron_h": {
        **ROUTED,
        "hybrid_override_pattern": ["M", "*", "M", "E", "-"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 8,
        "conv_kernel": 4,
        "n_groups": 2,
        "time_step_limit": [0.0, 10.0],
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
        "moe_shared_expert_intermediate_size": 32,
    },
    "olmo2": {},
    "olmo3": SLIDING_AND_FULL,
    "olmo_hybrid": {
        **DELTA,
        "linear_allow_neg_eigval": True,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "openelm": {
        "num_transformer_layers": 2,
        "model_dim": 64,
        "ffn_dim_divisor": 16,
        "num_query_heads": [4, 6],
        "num_kv_heads": [2, 3],
        "ffn_multipliers": [1.0, 2.0],
    },
    "phi": {"partial_rotary_factor": 0.5, "layer_norm_eps": 1e-5},
    "phi3": {"original_max_position_embeddings": 16, "rope_scaling": LONGROPE},
    "phimoe": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "original_max_position_embeddings": 16,
        "rope_scaling": {**LONGROPE, "short_mscale": 1.1, "long_mscale": 1.2},
    },
    "plamo": {"n_shared_head": 2},
    "plamo3": {"sliding_window": WINDOW, "sliding_window_pattern": 2},
    "qwen": {"kv_channels": 16, "layer_norm_epsilon": 1e-6},
    "qwen2": {"tie_word_embeddings": True},
    "qwen2_moe": {**MOE, "shared_expert_intermediate_size": 48},
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_5": {**DELTA, **QWEN35_ROPE, "num_experts": 0},
    "qwen3_5_moe": {**DELTA, **SHARED_MOE, **QWEN35_ROPE, "tie_word_embeddings": True},
    "qwen3_moe": {**MOE, "mlp_only_layers": [0], "decoder_sparse_step": 1},
    "qwen3_next": {**SHARED_MOE, **DELTA},
    "seed_oss": {"attention_bias": True},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "solar_open": GLM4_MOE,
    "spark2_5": {**SLIDING_AND_FULL, **ROPE_BY_LAYER_TYPE},
    "stablelm": {
        "use_qkv_bias": True,
        "partial_rotary_factor": 0.5,
        "layer_norm_eps": 1e-5,
        "qk_layernorm": True,
    },
    "starcoder2": {"norm_epsilon": 1e-5},
    "step3p5": {
        **SLIDING_AND_FULL,
        "num_attention_groups": 2,
        "attention_other_setting": {"num_attention_heads": 4, "num_attention_groups": 1},
        "partial_rotary_factors": [1.0, 0.5, 1.0],
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "moe_intermediate_size": 32,
        "share_expert_dim": 32,
        "moe_layers_enum": "1,2",
    },
    "talkie": {},
    "telechat3": {},
    "youtu_llm": LATENT,
}

# Vision models, of which only the language model is built: its config stands in theirs.
LANGUAGE_MODELS = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "kimi_k25": "deepseek_v3",
    "kimi_vl": "deepseek_v3",
    "lfm2-vl": "lfm2",
    "mistral3": "ministral3",
    "pixtral": "llama",
    "qwen2_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
}
TINY |= {
    family: {"text_config": {"model_type": text, **COMMON, **TINY[text]}}
    for family, text in LANGUAGE_MODELS.items()
}

# Families that are not served, for the tests that a trunk notices it by itself.
REFUSED_TINY: dict[str, dict[str, Any]] = {
    "afm7": {"hidden_dim": 64, "num_layers": 3, "num_kv_reuse_layers": 1, "num_heads": 4, "num_kv_heads": 2},
    "gemma2": {"query_pre_attn_scalar": 16.0},
    "gpt_bigcode": GPT,
    "jamba": {
        "attn_layer_offset": 0,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_expand": 2,
        "mamba_dt_rank": 4,
        "mamba_proj_bias": False,
        "mamba_conv_bias": True,
        "num_experts": 2,
        "num_experts_per_tok": 1,
    },
    "lille-130m": {
        "block_size": 64,
        "layer_norm_eps": 1e-5,
        "n_embd": 64,
        "n_head": 4,
        "n_kv_heads": 2,
        "n_layer": 2,
    },
    "mamba": {
        "state_size": 8,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
    },
    "phi3small": {
        "dense_attention_every_n_layers": 2,
        "ff_intermediate_size": 64,
        "gegelu_limit": 20.0,
        "layer_norm_epsilon": 1e-5,
    },
    "recurrent_gemma": {
        "attention_window_size": WINDOW,
        "block_types": ["recurrent", "attention"],
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "lru_width": 64,
        "embeddings_scale_by_sqrt_dim": True,
    },
    "rwkv7": {
        "norm_eps": 1e-5,
        "norm_first": True,
        "decay_low_rank_dim": 8,
        "gate_low_rank_dim": 8,
        "a_low_rank_dim": 8,
        "v_low_rank_dim": 8,
    },
}

# How a model is quantised, by the end of its name, as in "llama-4bit": the names of published models.
# "128g" stands for groups of 128.
QUANTIZATIONS: dict[str, dict[str, Any]] = {
    "4bit": {"bits": 4, "group_size": 32},
    "5bit": {"bits": 5, "group_size": 32},
    "6bit": {"bits": 6, "group_size": 64},
    "8bit": {"bits": 8, "group_size": 32},
    "mixed": {"bits": 4, "group_size": 32},
    "4bit_128g": {"bits": 4, "group_size": 128},
    "5bit_128g": {"bits": 5, "group_size": 128},
    "mxfp4": {"bits": 4, "group_size": 32, "mode": "mxfp4"},
    "mxfp8": {"bits": 8, "group_size": 32, "mode": "mxfp8"},
    "nvfp4": {"bits": 4, "group_size": 16, "mode": "nvfp4"},
}
MIXED: dict[str, bool | dict[str, int]] = {  # layers of a mixed model that differ, by the end of their names
    "v_proj": {"bits": 6, "group_size": 32},
    "down_proj": {"bits": 5, "group_size": 32},
    "embed_tokens": {"bits": 8, "group_size": 64},
    "lm_head": {"bits": 6, "group_size": 64},
    "o_proj": False,
}
WIDE_LATENT = {"kv_lora_rank": 32, "q_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
WIDE = {  # sizes that a group of 32 divides, for families whose tiny models have smaller ones
    "mimo_v2_flash": {"v_head_dim": 16, "swa_v_head_dim": 16},  # OpenBLAS sums 8 columns in another order
    **{family: WIDE_LATENT for family, own in TINY.items() if "kv_lora_rank" in own},
}
WIDE_FOR_128 = {  # sizes that a group of 128 divides, for families that use these names alone
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "head_dim": 32,
    "linear_value_head_dim": 32,
}
QUANTIZABLE_CELLS = {  # sizes of keys and values that a group of 32 divides; for all others {"head_dim": 32}
    family: {**WIDE_LATENT, "qk_rope_head_dim": 32} for family, own in TINY.items() if "kv_lora_rank" in own
}
# Families with latent attention in two forms: a single token is computed in another form than more tokens.
# The sums differ in their last bits. In a quantised model the next layer rounds to 15 bits, and some tokens
# then differ by a step of that. Other families have one form (cpu/latent_attention.py). mistral4 joins keys
# in a way of its own; deepseek_v32 and glm_moe_dsa gather the cells of a single token.
SUMS_DEPEND_ON_WIDTH = frozenset({"deepseek_v32", "glm_moe_dsa", "mistral4"})

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL_TOKENS = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
END_ID = 0


def tiny_config(family: str) -> dict[str, Any]:
    """What the family's config.json would say."""
    own = TINY[family] if family in TINY else REFUSED_TINY[family]
    return copy.deepcopy({"model_type": family, **COMMON, **own})


def tiny_model(family: str, **changes: Any) -> nn.Module:
    """A float32 model of the family; the same weights each time."""
    return _build(family, tiny_config(family) | changes)


def _build(family: str, config: dict[str, Any]) -> nn.Module:
    arch = importlib.import_module(f"mlx_lm.models.{family}")
    model: nn.Module = arch.Model(arch.ModelArgs.from_dict(config))
    model.eval()
    fill(model, zlib.crc32(family.encode()))
    return model


def quantized_tiny_model(name: str, only: str = "", **changes: Any) -> tuple[nn.Module, dict[str, Any]]:
    """A tiny model quantised by mlx-lm ("llama-4bit", "qwen3_moe-mixed"), and what its config.json says.

    A layer whose inputs are no multiple of the group size stays as it is, and one whose name lacks `only`.
    """
    family, _, quantization = name.rpartition("-")
    how = QUANTIZATIONS[quantization]
    wide = WIDE_FOR_128 if how["group_size"] == 128 else WIDE.get(family, {})
    config = tiny_config(family) | wide | changes

    def own(path: str, layer: nn.Module) -> bool | dict[str, int]:
        if only not in path or layer.weight.shape[-1] % 32:  # MLX packs nvfp4 in pieces of 32
            return False
        return own_quantization(quantization, path, layer)

    return quantize_model(_build(family, config), config, **how, quant_predicate=own)


def own_quantization(quantization: str, path: str, layer: nn.Module) -> bool | dict[str, int]:
    """What config.json says of a layer, as in MIXED, or True: as the other layers."""
    found = MIXED.get(path.rpartition(".")[2], True) if quantization == "mixed" else True
    if isinstance(found, dict) and layer.weight.shape[-1] % found["group_size"]:
        return True
    return found


def is_quantized_name(name: str) -> bool:
    return name.rpartition("-")[2] in QUANTIZATIONS


def fill(model: nn.Module, seed: int) -> None:
    """Give every parameter a random value, those that start as zeros or ones too, so that each one counts."""
    keys = mx.random.split(mx.random.key(seed), 4096)
    filled = [
        (name, _filled(name, array, keys[i]) if mx.issubdtype(array.dtype, mx.floating) else array)
        for i, (name, array) in enumerate(tree_flatten(model.parameters()))
    ]
    model.update(tree_unflatten(filled))
    mx.eval(model.parameters())


def _filled(name: str, array: mx.array, key: mx.array) -> mx.array:
    noise = mx.random.normal(array.shape, key=key)
    if name.endswith("A_log"):
        return 0.3 * noise - 1.5  # states that remember for some ten tokens
    if array.ndim >= 2:
        return noise * (1.4 / math.sqrt(array.shape[-1]))
    return mx.round(array.astype(mx.float32)) + 0.1 * noise  # about 1 for norms, about 0 for biases


def write_checkpoint(folder: Path, name: str, **changes: Any) -> nn.Module:
    """Write a folder that can be loaded: config, weights, tokenizer. Returns the model that it holds.

    `name` is a family, or that of a quantised model: "llama-4bit".
    """
    if is_quantized_name(name):
        model, config = quantized_tiny_model(name, **changes)
    else:
        model, config = tiny_model(name, **changes), tiny_config(name) | changes
    save_checkpoint(folder, model, {"eos_token_id": END_ID} | config)
    return model


def save_checkpoint(folder: Path, model: nn.Module, config: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    mx.save_safetensors(
        str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"}
    )
    write_tokenizer(folder)


def write_tokenizer(
    folder: Path,
    special_tokens: Sequence[str] = SPECIAL_TOKENS,
    template: str = CHAT_TEMPLATE,
    **settings: Any,
) -> None:
    """A byte-level tokenizer: the special tokens, then single ASCII characters; VOCAB_SIZE ids or more."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    wanted = [symbol for symbol in alphabet if symbol.isascii()] + ["Ġ", "Ċ", "ĉ"]
    symbols = [*special_tokens, *wanted]
    symbols += [s for s in alphabet if s not in symbols][: max(0, VOCAB_SIZE - len(symbols))]
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(symbols)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special_tokens])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": special_tokens[END_ID],
        "chat_template": template,
        "clean_up_tokenization_spaces": False,
        **settings,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
