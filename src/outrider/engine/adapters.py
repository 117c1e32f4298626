"""The adapters that requests can name. Pure Python: models/adapters/store.py has the arrays.

`AdapterDirectory` is for any thread and holds no arrays. `AdapterStore` is for the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from outrider.plan import AdapterInfo
from outrider.request import InvalidRequest


class UnknownAdapter(InvalidRequest):
    """No loaded adapter has the name that a request has."""


class AdapterRefused(ValueError):
    """An adapter cannot be loaded. The message gives the reason."""


class AdapterConflict(ValueError):
    """The name is taken, or running requests use the adapter."""


class AdapterStore(Protocol):
    """What the engine needs of models/adapters/store.py."""

    @property
    def loaded(self) -> Mapping[str, AdapterInfo]: ...  # by name

    @property
    def for_all(self) -> AdapterInfo | None: ...  # the adapter of rows that name none

    @property
    def num_bytes(self) -> int: ...

    @property
    def reader(self) -> Callable[[str], Any]: ...  # reads a folder, on any thread; raises ValueError

    def load(self, name: str, files: Any) -> AdapterInfo: ...  # raises ValueError

    def unload(self, name: str) -> None: ...


def _refuse(*_: object) -> Any:
    raise AdapterRefused("this engine takes no adapters")


class NoAdapters:
    """For engines without adapters."""

    loaded: Mapping[str, AdapterInfo] = {}
    for_all: AdapterInfo | None = None
    num_bytes = 0
    reader = load = unload = staticmethod(_refuse)


class AdapterDirectory:
    """The loaded adapters by name. The engine thread updates it, any thread reads it."""

    def __init__(self, store: AdapterStore) -> None:
        self.loaded = store.loaded
        self._for_all = store.for_all
        self._read = store.reader

    def load(self, store: AdapterStore, name: str, files: Any) -> AdapterInfo:
        """On the engine thread. `files`: what `read` has returned. Raises AdapterRefused, AdapterConflict."""
        if name in self.loaded:
            raise AdapterConflict(
                f"an adapter {name!r} is loaded already: unload it first, or name it otherwise."
            )
        try:
            return store.load(name, files)
        except (ValueError, RuntimeError) as error:  # RuntimeError: MLX, for example without memory
            raise AdapterRefused(str(error)) from error
        finally:
            self.loaded = store.loaded

    def unload(self, store: AdapterStore, name: str, num_users: int) -> AdapterInfo:
        """On the engine thread. Raises UnknownAdapter; AdapterConflict if requests use the adapter."""
        info = self.find(name)
        assert info is not None
        if num_users:
            raise AdapterConflict(
                f"{num_users} requests use the adapter {name!r}, running or waiting: try again when they "
                "have ended."
            )
        store.unload(name)
        self.loaded = store.loaded
        return info

    def find(self, name: str | None) -> AdapterInfo | None:
        """The adapter of a request that has this name. Raises UnknownAdapter."""
        if name is None:
            return self._for_all
        found = self.loaded.get(name)
        if found is None:
            known = ", ".join(self.loaded) or "none"
            raise UnknownAdapter(
                f"there is no adapter {name[:64]!r} on this server. Loaded adapters: {known}."
            )
        return found

    def read(self, path: str) -> Any:
        """The contents of an adapter's folder. Raises AdapterRefused."""
        try:
            return self._read(path)
        except ValueError as error:
            raise AdapterRefused(str(error)) from error
