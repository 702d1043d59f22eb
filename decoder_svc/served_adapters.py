"""The LoRA adapters that requests may name, which operators can change while a decoder runs."""

from __future__ import annotations

import asyncio
import pathlib
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from decoder_svc.engine.engine import Engine
from lookonce.errors import InvalidParameterError, ModelFolderError, UnsupportedError
from lookonce.model.adapter_folder import AdapterFolder

# Pause between two looks at the requests of an adapter that leaves, seconds.
_PAUSE_S = 0.02


class ServedAdapters:
    """Names of adapters, with the contents that the engine has. Use it from one event loop."""

    def __init__(self, engine: Engine, model: str, root: pathlib.Path | None) -> None:
        """`model` is the base model's served name. Adapters are loaded from folders in `root`; None: from nowhere."""
        self._engine = engine
        self._model = model
        self._root = root
        self._fingerprints = dict(engine.facts.adapters)
        # For each request of an adapter, by fingerprint: whether the engine may still have it.
        self._users: defaultdict[str, dict[object, Callable[[], bool]]] = defaultdict(dict)
        # Adapters that wait for their last requests.
        self._leaving: set[str] = set()
        # One change comes after the other.
        self._changing = asyncio.Lock()
        # Changes that go on when their calls have ended.
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def names(self) -> list[str]:
        """The names that requests may have, sorted."""
        return sorted(self._fingerprints)

    @contextmanager
    def used(self, name: str, is_live: Callable[[], bool]) -> Iterator[str | None]:
        """Yields the fingerprint of an adapter, which stays loaded in the block while `is_live`; None for no name.

        A call may take long after the engine is done with it, because its reader is slow.

        Raises InvalidParameterError for a name that is not served.
        """
        if not name:
            yield None
            return
        fingerprint = self._fingerprints.get(name)
        if fingerprint is None:
            known = ", ".join(self.names) or "none"
            raise InvalidParameterError("adapter", f"{name[:64]!r} is not served; this server has {known}")
        user = object()
        self._users[fingerprint][user] = is_live
        try:
            yield fingerprint
        finally:
            del self._users[fingerprint][user]
            if not self._users[fingerprint]:
                del self._users[fingerprint]

    async def load(self, name: str) -> None:
        """Loads the adapter in the folder of this name, unless it is served with the same content.

        It goes on if the call ends first. Raises UnsupportedError without a folder of adapters, and
        InvalidParameterError for an adapter that cannot be served, or whose name has another content here: drop that
        first.
        """
        if self._root is None:
            raise UnsupportedError("adapters are loaded by servers that were started with adapters_folder only")
        await asyncio.shield(self._started(self._load(name, self._root)))

    async def unload(self, name: str) -> None:
        """Refuses new requests for an adapter, waits for those that have it, and frees it.

        If the call ends while it waits, the adapter is served again. Raises InvalidParameterError for a name that is
        not served.
        """
        fingerprint = self._fingerprints.pop(name, None)
        if fingerprint is None:
            raise InvalidParameterError("name", f"{name[:64]!r} is not served")
        self._leaving.add(name)
        dropping: asyncio.Task[None] | None = None
        try:
            while True:
                async with self._changing:
                    if fingerprint in self._fingerprints.values():
                        # The same content has another name.
                        return
                    if not self._is_used(fingerprint):
                        dropping = self._started(self._engine.change_adapter(name, "", fingerprint))
                        await asyncio.shield(dropping)
                        return
                await asyncio.sleep(_PAUSE_S)
        except asyncio.CancelledError:
            if dropping is None:
                self._fingerprints[name] = fingerprint
            raise
        finally:
            self._leaving.discard(name)

    def _is_used(self, fingerprint: str) -> bool:
        return any(is_live() for is_live in self._users.get(fingerprint, {}).values())

    async def _load(self, name: str, root: pathlib.Path) -> None:
        if name == self._model:
            raise InvalidParameterError("name", f"{name} is the name of the base model")
        async with self._changing:
            if name in self._leaving:
                raise InvalidParameterError("name", f"{name} is being unloaded; call again when that has ended")
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

    def _started(self, change: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts a change, which goes on if the call that waits for it ends. The engine takes them in their order."""
        task = asyncio.ensure_future(change)
        self._tasks.add(task)
        task.add_done_callback(self._end)
        return task

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            # The call that waited may have ended, and then nobody asks for the error.
            task.exception()
