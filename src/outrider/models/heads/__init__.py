"""MTP heads: where they are stored, which layout they have, and the one module that all of them become.

layouts           which tensors of a checkpoint are a head, by their names alone
head_files        where the head of a model is stored, by the headers of the files alone
norm_format       whether the norms of a head are as published (minus 1) or converted
blocks            the decoder block of a family's head, built from the trunk's own classes
weights           turns published or converted tensors into parameters
module            the forward pass, the same for all families
division          one rank's part of a head
draft_projection  the output projection of a reduced draft vocabulary
quantization      quantised layers: as files store them, and as `--bits` writes them
loading           uses all of the above, and refuses heads that do not fit
extract           copies the head of an original checkpoint beside a converted model
originals         where original checkpoints come from
"""

from outrider.models.heads.division import HeadNotDivisible, divide, divided_draft_projection
from outrider.models.heads.draft_projection import draft_projection
from outrider.models.heads.errors import HeadError, UnknownHead
from outrider.models.heads.head_files import (
    HEAD_FILES,
    HeadFiles,
    find_head,
    locate,
    locate_file,
    separate_drafter,
)
from outrider.models.heads.layouts import HeadSpec, expected, recognise
from outrider.models.heads.loading import LoadedHead, load_head, new_head
from outrider.models.heads.module import MTPHead, head_kv_spec, head_layout
from outrider.models.heads.quantization import (
    Quantization,
    QuantizedLayers,
    quantize_as_stored,
    quantize_layers,
)

__all__ = [
    "HEAD_FILES",
    "HeadError",
    "HeadFiles",
    "HeadNotDivisible",
    "HeadSpec",
    "LoadedHead",
    "MTPHead",
    "Quantization",
    "QuantizedLayers",
    "UnknownHead",
    "divide",
    "divided_draft_projection",
    "draft_projection",
    "expected",
    "find_head",
    "head_kv_spec",
    "head_layout",
    "load_head",
    "locate",
    "locate_file",
    "new_head",
    "quantize_as_stored",
    "quantize_layers",
    "recognise",
    "separate_drafter",
]
