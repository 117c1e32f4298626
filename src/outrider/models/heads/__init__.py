"""MTP heads: where they are, which layout they have, and the one module that all of them become.

layouts   names alone: which tensors of a checkpoint are a head, and what each of them is
files     headers alone: where the head of a model lies
blocks    the decoder block of a family's head, from the trunk's own classes
weights   published, converted or quantised tensors to parameters
module    the arithmetic, the same for all
loading   all of the above, and what is refused
"""

from outrider.models.heads.errors import HeadError, UnknownHead
from outrider.models.heads.files import HEAD_FILES, HeadFiles, find_head, locate, locate_file
from outrider.models.heads.layouts import HeadSpec, expected, recognise
from outrider.models.heads.loading import LoadedHead, load_head, new_head
from outrider.models.heads.module import MTPHead, head_kv_spec, head_layout

__all__ = [
    "HEAD_FILES",
    "HeadError",
    "HeadFiles",
    "HeadSpec",
    "LoadedHead",
    "MTPHead",
    "UnknownHead",
    "expected",
    "find_head",
    "head_kv_spec",
    "head_layout",
    "load_head",
    "locate",
    "locate_file",
    "new_head",
    "recognise",
]
