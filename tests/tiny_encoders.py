"""Tiny encoders with random weights as Hugging Face publishes them, and causal embedding models.

A word tokenizer ("w7" is token 7 + the special ones), pooling files of sentence-transformers. Nothing is
downloaded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tiny_models import write_checkpoint

VOCAB_SIZE = 60
HIDDEN = 32
NUM_LAYERS = 2
INTERMEDIATE = 48
POSITIONS = 40
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
MODULES = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}

Arrays = dict[str, np.ndarray]

_BERT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": INTERMEDIATE,
    "max_position_embeddings": POSITIONS,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
    "pad_token_id": 0,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "bert": _BERT | {"model_type": "bert"},
    "roberta": _BERT
    | {"model_type": "roberta", "pad_token_id": 1, "type_vocab_size": 1, "layer_norm_eps": 1e-5},
    "xlm-roberta": _BERT | {"model_type": "xlm-roberta", "pad_token_id": 1, "type_vocab_size": 1},
    "mpnet": _BERT | {"model_type": "mpnet", "pad_token_id": 1, "relative_attention_num_buckets": 8},
    "distilbert": {
        "model_type": "distilbert",
        "vocab_size": VOCAB_SIZE,
        "dim": HIDDEN,
        "n_layers": NUM_LAYERS,
        "n_heads": 4,
        "hidden_dim": INTERMEDIATE,
        "max_position_embeddings": POSITIONS,
        "activation": "gelu",
    },
}
LAYER_NAMES = {  # of the tensors of layer N, in the order of `layer_parts`
    "bert": "encoder.layer.{n}.attention.self.query encoder.layer.{n}.attention.self.key "
    "encoder.layer.{n}.attention.self.value encoder.layer.{n}.attention.output.dense "
    "encoder.layer.{n}.attention.output.LayerNorm encoder.layer.{n}.intermediate.dense "
    "encoder.layer.{n}.output.dense encoder.layer.{n}.output.LayerNorm",
    "mpnet": "encoder.layer.{n}.attention.attn.q encoder.layer.{n}.attention.attn.k "
    "encoder.layer.{n}.attention.attn.v encoder.layer.{n}.attention.attn.o "
    "encoder.layer.{n}.attention.LayerNorm encoder.layer.{n}.intermediate.dense "
    "encoder.layer.{n}.output.dense encoder.layer.{n}.output.LayerNorm",
    "distilbert": "transformer.layer.{n}.attention.q_lin transformer.layer.{n}.attention.k_lin "
    "transformer.layer.{n}.attention.v_lin transformer.layer.{n}.attention.out_lin "
    "transformer.layer.{n}.sa_layer_norm transformer.layer.{n}.ffn.lin1 transformer.layer.{n}.ffn.lin2 "
    "transformer.layer.{n}.output_layer_norm",
}
HEADS = {  # names of the two layers of the classification head
    "bert": ("bert.pooler.dense", "classifier"),
    "roberta": ("classifier.dense", "classifier.out_proj"),
    "xlm-roberta": ("classifier.dense", "classifier.out_proj"),
    "mpnet": ("classifier.dense", "classifier.out_proj"),
    "distilbert": ("pre_classifier", "classifier"),
}


def layer_names(family: str, n: int) -> list[str]:
    return LAYER_NAMES.get(family, LAYER_NAMES["bert"]).format(n=n).split()


def encoder_weights(family: str, seed: int = 0, is_reranker: bool = False) -> Arrays:
    """Random weights under Hugging Face's names. Those of a reranker carry the model's prefix."""
    random = np.random.default_rng(seed)

    def normal(*shape: int, scale: float = 0.3) -> np.ndarray:
        return (scale * random.standard_normal(shape)).astype(np.float32)

    found: Arrays = {
        "embeddings.word_embeddings.weight": normal(VOCAB_SIZE, HIDDEN, scale=1.0),
        "embeddings.position_embeddings.weight": normal(POSITIONS, HIDDEN),
    }
    config = CONFIGS[family]
    if family == "mpnet":
        found["encoder.relative_attention_bias.weight"] = normal(8, 4, scale=1.0)
    num_types = 0 if family == "mpnet" else config.get("type_vocab_size", 0)
    if num_types:
        found["embeddings.token_type_embeddings.weight"] = normal(num_types, HIDDEN)

    def add(name: str, rows: int, columns: int | None) -> None:
        """A linear layer, or a norm if there are no columns."""
        found[f"{name}.weight"] = normal(rows, columns) if columns else 1 + normal(rows)
        found[f"{name}.bias"] = normal(rows)

    add("embeddings.LayerNorm", HIDDEN, None)
    for n in range(NUM_LAYERS):
        query, key, value, attended, norm, expand, contract, last = layer_names(family, n)
        for name in (query, key, value, attended):
            add(name, HIDDEN, HIDDEN)
        add(norm, HIDDEN, None)
        add(expand, INTERMEDIATE, HIDDEN)
        add(contract, HIDDEN, INTERMEDIATE)
        add(last, HIDDEN, None)
    if is_reranker:
        prefix = {"xlm-roberta": "roberta"}.get(family, family)
        found = {f"{prefix}.{name}": array for name, array in found.items()}
        dense, score = HEADS[family]
        add(dense, HIDDEN, HIDDEN)
        add(score, 1, HIDDEN)
    elif family == "bert":
        add("pooler.dense", HIDDEN, HIDDEN)  # published with many embedding models, and not used
    return found


def write_encoder(
    folder: Path,
    family: str = "bert",
    *,
    pooling: str = "mean",
    normalises: bool = True,
    max_seq_length: int | None = None,
    is_reranker: bool = False,
    seed: int = 0,
) -> Path:
    folder.mkdir(parents=True)
    architecture = "XForSequenceClassification" if is_reranker else "XModel"
    labels = {"id2label": {"0": "LABEL_0"}} if is_reranker else {}
    config = CONFIGS[family] | {"architectures": [architecture]} | labels
    (folder / "config.json").write_text(json.dumps(config))
    weights = encoder_weights(family, seed, is_reranker)
    mx.save_safetensors(
        str(folder / "model.safetensors"), {name: mx.array(array) for name, array in weights.items()}
    )
    write_word_tokenizer(folder)
    if not is_reranker:
        write_pooling(folder, pooling, normalises)
    if max_seq_length is not None:
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_seq_length}))
    return folder


def write_pooling(folder: Path, mode: str = "mean", normalises: bool = True) -> None:
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalises else [])]
    modules = [
        {"idx": i, "name": str(i), "path": MODULES[kind], "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    names = {
        "cls": "cls_token",
        "mean": "mean_tokens",
        "max": "max_tokens",
        "weightedmean": "weightedmean_tokens",
    }
    config = {"word_embedding_dimension": HIDDEN} | {
        f"pooling_mode_{names.get(name, name)}": name == mode
        for name in ("cls", "mean", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
    }
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))


def write_word_tokenizer(folder: Path) -> None:
    """Words w0, w1, ... With a truncation and a padding as in published files: they must not apply."""
    words = [*SPECIAL, *(f"w{i}" for i in range(VOCAB_SIZE - len(SPECIAL)))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(folder / "tokenizer.json"))


def words(*numbers: int) -> str:
    return " ".join(f"w{number}" for number in numbers)


def write_causal(folder: Path, family: str = "qwen3", pooling: str = "lasttoken", **changes: Any) -> Path:
    """A causal model with pooling files, its tensors named as in Qwen3-Embedding."""
    write_checkpoint(folder, family, **changes)
    file = str(folder / "model.safetensors")
    weights: Any = mx.load(file)
    mx.eval(weights)
    short = {name.removeprefix("model."): a for name, a in weights.items() if not name.startswith("lm_head.")}
    mx.save_safetensors(file, short)
    write_pooling(folder, pooling)
    return folder
