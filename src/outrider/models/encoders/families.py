"""The table of encoder families: their configs as one `EncoderShape`, their tensors under one set of names.

To add a family whose layers are BERT's, add a row to ENCODERS and a tiny config to tests/tiny_encoders.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from outrider.models.errors import ModelUnavailable

ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_python", "relu", "silu", "swish")


@dataclass(frozen=True)
class EncoderShape:
    """Sizes and choices of an encoder with BERT's layers."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    num_positions: int  # rows of the position embedding
    first_position: int  # of the first token: RoBERTa's positions start after the padding id
    num_types: int  # rows of the token type embedding; 0: there is none
    eps: float
    activation: str  # one of ACTIVATIONS
    num_buckets: int = 0  # of distances between tokens, each with a bias of the scores (MPNet); 0: none

    @property
    def max_tokens(self) -> int:
        return self.num_positions - self.first_position


Renames = tuple[tuple[str, str], ...]  # regular expression, replacement; the first that matches is applied

# The left sides are Hugging Face's names without the model's prefix, the right sides those of network.py.
BERT_NAMES: Renames = (
    (r"embeddings\.word_embeddings\.", "words."),
    (r"embeddings\.position_embeddings\.", "positions."),
    (r"embeddings\.token_type_embeddings\.", "types."),
    (r"embeddings\.LayerNorm\.", "norm."),
    (r"encoder\.layer\.(\d+)\.attention\.self\.(query|key|value)\.", r"layers.\1.\2."),
    (r"encoder\.layer\.(\d+)\.attention\.output\.dense\.", r"layers.\1.attended."),
    (r"encoder\.layer\.(\d+)\.attention\.output\.LayerNorm\.", r"layers.\1.attended_norm."),
    (r"encoder\.layer\.(\d+)\.intermediate\.dense\.", r"layers.\1.expand."),
    (r"encoder\.layer\.(\d+)\.output\.dense\.", r"layers.\1.contract."),
    (r"encoder\.layer\.(\d+)\.output\.LayerNorm\.", r"layers.\1.contracted_norm."),
)
DISTILBERT_NAMES: Renames = (
    *BERT_NAMES[:4],
    (r"transformer\.layer\.(\d+)\.attention\.q_lin\.", r"layers.\1.query."),
    (r"transformer\.layer\.(\d+)\.attention\.k_lin\.", r"layers.\1.key."),
    (r"transformer\.layer\.(\d+)\.attention\.v_lin\.", r"layers.\1.value."),
    (r"transformer\.layer\.(\d+)\.attention\.out_lin\.", r"layers.\1.attended."),
    (r"transformer\.layer\.(\d+)\.sa_layer_norm\.", r"layers.\1.attended_norm."),
    (r"transformer\.layer\.(\d+)\.ffn\.lin1\.", r"layers.\1.expand."),
    (r"transformer\.layer\.(\d+)\.ffn\.lin2\.", r"layers.\1.contract."),
    (r"transformer\.layer\.(\d+)\.output_layer_norm\.", r"layers.\1.contracted_norm."),
)
MPNET_NAMES: Renames = (
    *BERT_NAMES[:2],
    BERT_NAMES[3],
    (r"encoder\.relative_attention_bias\.", "distances."),
    (r"encoder\.layer\.(\d+)\.attention\.attn\.q\.", r"layers.\1.query."),
    (r"encoder\.layer\.(\d+)\.attention\.attn\.k\.", r"layers.\1.key."),
    (r"encoder\.layer\.(\d+)\.attention\.attn\.v\.", r"layers.\1.value."),
    (r"encoder\.layer\.(\d+)\.attention\.attn\.o\.", r"layers.\1.attended."),
    (r"encoder\.layer\.(\d+)\.attention\.LayerNorm\.", r"layers.\1.attended_norm."),
    *BERT_NAMES[7:],
)
# The classification head of each family: two layers over the state of the first token.
BERT_HEAD: Renames = ((r"pooler\.dense\.", "head.dense."), (r"classifier\.", "head.score."))
ROBERTA_HEAD: Renames = (
    (r"classifier\.dense\.", "head.dense."),
    (r"classifier\.out_proj\.", "head.score."),
)
DISTILBERT_HEAD: Renames = ((r"pre_classifier\.", "head.dense."), (r"classifier\.", "head.score."))


@dataclass(frozen=True)
class EncoderFamily:
    prefix: str  # that some checkpoints put before every name
    names: Renames
    head_names: Renames
    head_activation: str
    shape: Callable[[Mapping[str, Any]], EncoderShape]


def _bert_shape(config: Mapping[str, Any], first_position: int = 0) -> EncoderShape:
    return EncoderShape(
        vocab_size=int(config["vocab_size"]),
        hidden_size=int(config["hidden_size"]),
        num_layers=int(config["num_hidden_layers"]),
        num_heads=int(config["num_attention_heads"]),
        intermediate_size=int(config["intermediate_size"]),
        num_positions=int(config["max_position_embeddings"]),
        first_position=first_position,
        num_types=int(config.get("type_vocab_size", 2)),
        eps=float(config.get("layer_norm_eps", 1e-12)),
        activation=str(config.get("hidden_act", "gelu")),
    )


def _roberta_shape(config: Mapping[str, Any]) -> EncoderShape:
    padding_id = config.get("pad_token_id")
    return _bert_shape(config, first_position=1 + int(1 if padding_id is None else padding_id))


def _mpnet_shape(config: Mapping[str, Any]) -> EncoderShape:
    num_buckets = int(config.get("relative_attention_num_buckets", 32))
    return replace(_roberta_shape(config), num_types=0, num_buckets=num_buckets)


def _distilbert_shape(config: Mapping[str, Any]) -> EncoderShape:
    return EncoderShape(
        vocab_size=int(config["vocab_size"]),
        hidden_size=int(config["dim"]),
        num_layers=int(config["n_layers"]),
        num_heads=int(config["n_heads"]),
        intermediate_size=int(config["hidden_dim"]),
        num_positions=int(config["max_position_embeddings"]),
        first_position=0,
        num_types=0,
        eps=1e-12,
        activation=str(config.get("activation", "gelu")),
    )


_ROBERTA = EncoderFamily("roberta.", BERT_NAMES, ROBERTA_HEAD, "tanh", _roberta_shape)
ENCODERS: Mapping[str, EncoderFamily] = {  # by model_type
    "bert": EncoderFamily("bert.", BERT_NAMES, BERT_HEAD, "tanh", _bert_shape),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "mpnet": EncoderFamily("mpnet.", MPNET_NAMES, ROBERTA_HEAD, "tanh", _mpnet_shape),
    "distilbert": EncoderFamily("distilbert.", DISTILBERT_NAMES, DISTILBERT_HEAD, "relu", _distilbert_shape),
}
# Encoders that are known and not supported: without this list they would be taken for chat models.
OTHER_ENCODERS = (
    "albert", "big_bird", "deberta", "deberta-v2", "electra", "ernie", "eurobert", "funnel", "gte",
    "jina_bert", "mobilebert", "modernbert", "new", "nomic_bert", "rembert", "squeezebert", "t5",
    "xlnet",
)  # fmt: skip


def is_encoder(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") in (*ENCODERS, *OTHER_ENCODERS)


def family_of(config: Mapping[str, Any]) -> EncoderFamily:
    kind = str(config.get("model_type"))
    if kind not in ENCODERS:
        raise ModelUnavailable(
            f"the encoder family {kind!r} is not supported. Supported: {', '.join(ENCODERS)}."
        )
    return ENCODERS[kind]


def shape_of(config: Mapping[str, Any]) -> EncoderShape:
    """The encoder's sizes. Raises ModelUnavailable for a config that is incomplete or not supported."""
    kind = config.get("model_type")
    try:
        shape = family_of(config).shape(config)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelUnavailable(f"config.json of this {kind} model is incomplete: {error!r}.") from None
    positions = config.get("position_embedding_type", "absolute")
    if positions != "absolute":
        raise ModelUnavailable(f"config.json: position_embedding_type {positions!r} is not supported.")
    if shape.activation not in ACTIVATIONS:
        raise ModelUnavailable(f"config.json: the activation {shape.activation!r} is not supported.")
    if min(shape.vocab_size, shape.hidden_size, shape.num_layers, shape.num_heads, shape.max_tokens) < 1:
        raise ModelUnavailable(f"config.json of this {kind} model has a size below 1.")
    if shape.hidden_size % shape.num_heads:
        raise ModelUnavailable(
            f"config.json: hidden_size {shape.hidden_size} is no multiple of {shape.num_heads} heads."
        )
    return shape


def renamed(name: str, family: EncoderFamily, has_head: bool) -> str | None:
    """The name of a tensor in network.py; None for a tensor that is not used."""
    name = name.removeprefix(family.prefix)
    for old, new in (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")):
        name = name.replace(old, new)  # of checkpoints that came from TensorFlow
    for pattern, replacement in (*family.names, *(family.head_names if has_head else ())):
        found, count = re.subn(rf"^{pattern}", replacement, name)
        if count:
            return found
    return None
