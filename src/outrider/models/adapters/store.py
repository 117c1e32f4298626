"""The adapters that are loaded now, of one trunk. Used on the engine thread, except where it says otherwise.

An adapter has an id from 1 on while it is loaded; rows name it by that id (`RowPlan.adapter`). Ids are used
again. Who unloads an adapter must know that no row uses it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import mlx.core as mx
import mlx.nn as nn

from outrider.cache.placement import LowRankTerms, RowAdapters
from outrider.models.adapters.files import AdapterError, AdapterFiles, read_adapter
from outrider.models.adapters.fit import LINEAR, SWITCH, LayerTerms, adapted_layers, linear_terms, refusal
from outrider.models.adapters.terms import CurrentPass, StackedTerms, new_terms, use_adapters
from outrider.plan import AdapterInfo

ArraysByPath = dict[str, dict[str, mx.array]]  # by the path of the layer and the name of the array

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # no colon: requests may name a model as base:adapter
FUSED = "fused"  # the name of the adapter that all rows have

OUTSIDE = (
    "Only linear layers inside the decoder can have an adapter for each request. The output projection and "
    "the embeddings are shared by all rows: fuse the adapter with --adapter."
)
OUTSIDE_QUANTIZED = (
    "It is quantised, so the adapter cannot be fused into its weights, and it is outside the decoder, where "
    "rows do not compute with adapters. Fuse the adapter with mlx_lm.fuse."
)
EXPERTS = (
    "Adapters of experts are not served for each request: every token would read factors of its own for each "
    "of its experts. Fuse the adapter with --adapter, or train one without these layers."
)


class TracedArrays:
    """The stacked arrays of all layers, and their shapes, which are part of a trace's key."""

    def __init__(self, arrays: ArraysByPath, version: int = 0) -> None:
        """`version`: of terms that are not among the arrays, but built into a trace."""
        self.arrays = arrays
        named = [(path, name, one) for path, own in arrays.items() for name, one in own.items()]
        self.shapes = version, tuple((path, name, one.shape) for path, name, one in named)
        self.num_bytes = sum(one.nbytes for _, _, one in named)


def stacked_terms(terms: Mapping[str, LowRankTerms]) -> dict[str, StackedTerms]:
    return {path: own for path, own in terms.items() if isinstance(own, StackedTerms)}


class TrunkAdapters:
    """Implements `AdapterStore` of engine/adapters.py."""

    def __init__(self, model: nn.Module, stack: nn.Module, dtype: mx.Dtype) -> None:
        """`stack`: the part of the model whose layers may have adapters for each row."""
        self.current_pass = CurrentPass()
        self.loaded: Mapping[str, AdapterInfo] = {}  # by name; replaced, never changed: for any thread
        self.for_all: AdapterInfo | None = None  # the adapter of rows that name none
        self.max_adapters = 0
        self.max_bytes = 0
        self._model = model
        self._stack = stack
        self._dtype = dtype
        self._factors: dict[int, dict[str, LayerTerms]] = {}  # by id and path
        self._terms: dict[str, LowRankTerms] = {}  # by path
        self._num_changes = 0
        self.traced = TracedArrays({})  # what a traced pass takes as inputs

    def allow(self, max_adapters: int, max_bytes: int) -> None:
        """How many adapters may be loaded at once, and how many bytes they may take."""
        self.max_adapters, self.max_bytes = max_adapters, max_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of all adapters that requests can name."""
        factors = sum(info.num_bytes for info in self.loaded.values())
        return factors + (self.traced.num_bytes if self.loaded else 0)

    # -- loading -----------------------------------------------------------------------------------------

    @property
    def reader(self) -> Callable[[str], AdapterFiles]:
        """Reads and checks an adapter's folder, on any thread. Raises AdapterError. Holds no arrays."""
        return partial(read_adapter, max_bytes=self.max_bytes)

    def load(self, name: str, files: AdapterFiles) -> AdapterInfo:
        """Raises AdapterError; then everything is as before."""
        if NAME.fullmatch(name) is None:
            raise AdapterError(
                f"the adapter's name {name!r} must be 1 to 64 letters, digits, '.', '_' and '-', and begin "
                "with a letter or a digit."
            )
        if self.for_all is not None:
            raise AdapterError(
                f"this server answers every request with the adapter {self.for_all.path} (--adapter): it "
                "loads no other one."
            )
        if not self.max_adapters:
            raise AdapterError(
                "this server takes no adapters for single requests: start it with --adapters, --adapters-dir "
                "or LLM(max_adapters=...)."
            )
        if len(self.loaded) >= self.max_adapters:
            raise AdapterError(
                f"{len(self.loaded)} adapters are loaded, as many as --max-adapters allows: unload one first."
            )
        factors = self._row_terms(files)
        info = self._info(name, files, factors)
        if self.num_bytes + info.num_bytes > self.max_bytes:
            raise AdapterError(
                f"the adapter takes {info.num_bytes:,} bytes, and {self.num_bytes:,} of {self.max_bytes:,} "
                "are taken (--adapter-memory): unload another one first."
            )
        self._put(info, factors)
        self.loaded = {**self.loaded, name: info}
        if self.num_bytes > self.max_bytes:  # padded arrays took more than the factors
            self.unload(name)
            raise AdapterError(
                f"with the adapter, all of them would take more than {self.max_bytes:,} bytes "
                "(--adapter-memory): unload another one first."
            )
        return info

    def load_for_all(self, files: AdapterFiles, factors: dict[str, LayerTerms]) -> None:
        """Give every row the terms that could not be fused into the weights."""
        self._check_inside(files, list(factors), OUTSIDE_QUANTIZED)
        self.for_all = self._info(FUSED, files, factors)
        self._put(self.for_all, factors)

    def unload(self, name: str) -> None:
        """No row may use the adapter."""
        info = self.loaded[name]
        self.loaded = {other: own for other, own in self.loaded.items() if other != name}
        self._remove(info)

    def _row_terms(self, files: AdapterFiles) -> dict[str, LayerTerms]:
        layers = adapted_layers(files, self._model)
        for layer in layers:
            if isinstance(layer.module, SWITCH):
                raise refusal(files, layer, EXPERTS)
            if not isinstance(layer.module, LINEAR):
                raise refusal(files, layer, OUTSIDE)
        self._check_inside(files, [layer.path for layer in layers], OUTSIDE)
        return {layer.path: linear_terms(files, layer) for layer in layers}

    def _check_inside(self, files: AdapterFiles, paths: list[str], reason: str) -> None:
        inside = {id(module) for _, module in self._stack.named_modules()}
        modules = dict(self._model.named_modules())
        for path in paths:
            if id(modules[path]) not in inside:
                raise AdapterError(f"{files.path}: the adapter changes {path}. {reason}")

    def _info(self, name: str, files: AdapterFiles, factors: Mapping[str, LayerTerms]) -> AdapterInfo:
        free = next(i for i in range(1, len(self._factors) + 2) if i not in self._factors)
        num_bytes = sum(array.nbytes for own in factors.values() for array in own.arrays)
        return AdapterInfo(
            free, name, str(files.path), files.kind, files.rank, len(factors), num_bytes, files.fingerprint
        )

    def _put(self, info: AdapterInfo, factors: dict[str, LayerTerms]) -> None:
        modules = dict(self._model.named_modules())
        self._replace({**self._factors, info.id: factors}, factors)
        for path in factors:
            use_adapters(modules[path], path, self.current_pass)

    def _remove(self, info: AdapterInfo) -> None:
        others = {i: own for i, own in self._factors.items() if i != info.id}
        self._replace(others, self._factors[info.id])

    def _replace(self, factors: dict[int, dict[str, LayerTerms]], paths: Iterable[str]) -> None:
        """New terms for these layers. Passes that were built before keep the old ones."""
        modules, terms = dict(self._model.named_modules()), dict(self._terms)
        most = max(factors, default=0)
        too_short = [path for path, own in stacked_terms(terms).items() if own.a.shape[0] <= most]
        for path in {*paths, *too_short}:
            by_id = [factors.get(i, {}).get(path) for i in range(most + 1)]
            terms.pop(path, None)
            if any(own is not None for own in by_id):
                terms[path] = new_terms(modules[path], by_id, self._dtype)
        stacked = {path: own.arrays for path, own in sorted(stacked_terms(terms).items())}
        self._num_changes += 1
        version = self._num_changes if len(stacked) < len(terms) else 0
        self._factors, self._terms, self.traced = factors, terms, TracedArrays(stacked, version)

    # -- passes ------------------------------------------------------------------------------------------

    def of_pass(self, ids: mx.array | None, arrays: ArraysByPath | None = None) -> RowAdapters | None:
        """`ids` [rows]: None if no row has an adapter. `arrays`: those of `traced`, in a traced pass."""
        if ids is None:
            return None
        if arrays is None:
            return RowAdapters(ids, self._terms)
        return RowAdapters(ids, self._terms | {path: StackedTerms(**own) for path, own in arrays.items()})
