"""The LoRA adapters that requests may name, which operators can change while a decoder runs."""

from __future__ import annotations

import asyncio
import pathlib
from collections import Counter
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from decoder_svc.engine.engine import Engine
from lookonce.errors import ConfigurationError, InvalidParameterError, ModelFolderError, UnsupportedError
from lookonce.model.adapter_folder import AdapterFolder


class ServedAdapters:
    """Names of adapters, with the contents that the engine has. Use it from one event loop."""

    def __init__(self, engine: Engine, model: str, root: pathlib.Path | None) -> None:
        """`model` is the base model's served name. Adapters are loaded from folders in `root`; None: from nowhere.

        Raises ConfigurationError for an adapter with the name of the base model.
        """
        self._engine = engine
        self._model = model
        self._root = root
        self._fingerprints = dict(engine.facts.adapters)
        if model in self._fingerprints:
            raise ConfigurationError(f"--adapters: {model} is the name of the base model; name the adapter otherwise")
        # Live requests by the fingerprint of their adapter.
        self._num_users: Counter[str] = Counter()
        # Set when an adapter has no request any more.
        self._is_unused = asyncio.Event()
        # One change comes after the other.
        self._changing = asyncio.Lock()
        # Changes that go on when their calls have ended.
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def names(self) -> list[str]:
        """The names, sorted."""
        return sorted(self._fingerprints)

    @contextmanager
    def used(self, name: str) -> Iterator[str | None]:
        """Yields the fingerprint of an adapter, which stays loaded in the block; None for the empty name.

        Raises InvalidParameterError for a name that is not served.
        """
        if not name:
            yield None
            return
        fingerprint = self._fingerprints.get(name)
        if fingerprint is None:
            known = ", ".join(self.names) or "none"
            raise InvalidParameterError("adapter", f"{name[:64]!r} is not served; this server has {known}")
        self._num_users[fingerprint] += 1
        try:
            yield fingerprint
        finally:
            self._num_users[fingerprint] -= 1
            if not self._num_users[fingerprint]:
                del self._num_users[fingerprint]
                self._is_unused.set()

    async def load(self, name: str) -> None:
        """Loads the adapter in the folder of this name, unless it is served with the same content.

        It goes on if the call ends first. Raises UnsupportedError without a folder of adapters, and
        InvalidParameterError for an adapter that cannot be served, or whose name has another content here: drop that
        first.
        """
        if self._root is None:
            raise UnsupportedError("adapters are loaded by servers that were started with adapters_folder only")
        await self._completed(self._load(name, self._root))

    async def unload(self, name: str) -> None:
        """Refuses new requests for an adapter, waits for those that have it, and frees it.

        If the call ends while it waits, the adapter is served again. Raises InvalidParameterError for a name that is
        not served.
        """
        async with self._changing:
            fingerprint = self._fingerprints.pop(name, None)
            if fingerprint is None:
                raise InvalidParameterError("name", f"{name[:64]!r} is not served")
            if fingerprint in self._fingerprints.values():
                return
            try:
                while self._num_users[fingerprint]:
                    self._is_unused.clear()
                    await self._is_unused.wait()
            except asyncio.CancelledError:
                self._fingerprints[name] = fingerprint
                raise
            await self._completed(self._engine.change_adapter(name, "", fingerprint))

    async def _load(self, name: str, root: pathlib.Path) -> None:
        if name == self._model:
            raise InvalidParameterError("name", f"{name} is the name of the base model")
        async with self._changing:
            try:
                folder = await asyncio.to_thread(AdapterFolder.open, name, root / name)
                served = self._fingerprints.get(name)
                if served not in (None, folder.fingerprint):
                    raise InvalidParameterError("name", f"{name} is served with another content; unload it first")
                if folder.fingerprint not in self._fingerprints.values():
                    await self._engine.change_adapter(name, str(folder.path), folder.fingerprint)
            except ModelFolderError as error:
                raise InvalidParameterError("name", error.message) from None
            self._fingerprints[name] = folder.fingerprint

    async def _completed(self, change: Coroutine[Any, Any, None]) -> None:
        """Waits for a change, which goes on if the waiting is cancelled. The engine takes changes in their order."""
        task = asyncio.ensure_future(change)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.shield(task)
