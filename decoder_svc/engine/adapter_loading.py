"""Loads adapters on threads of their own, so that steps go on meanwhile."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable
from typing import Any

from decoder_svc.engine.messages import AdapterChanged, AdapterRead, ChangeAdapter
from decoder_svc.runner.base import ModelRunnerBase
from lookonce.errors import InternalError, LookonceError, OverloadedError
from lookonce.model.lack_of_memory import is_lack_of_memory

logger = logging.getLogger(__name__)


class AdapterLoading:
    """Reads adapters beside the steps of a runner, and adds them between two steps."""

    def __init__(self, runner: ModelRunnerBase, done: Callable[[AdapterRead], None]) -> None:
        """`done` gets each adapter that was read, on the thread that read it."""
        self._runner = runner
        self._done = done

    def begin(self, change: ChangeAdapter) -> None:
        """Starts to read an adapter. Its thread ends with it, and so do the threads that PyTorch starts there."""
        threading.Thread(target=self._read, args=(change,), name="adapter", daemon=True).start()

    def finish(self, read: AdapterRead) -> AdapterChanged:
        """Adds an adapter that was read. Call it on the engine thread."""
        error = read.error
        if error is None:
            error = _error_of(lambda: self._runner.add_adapter(read.change.fingerprint, read.prepared))
        return AdapterChanged(read.change.number, error)

    def _read(self, change: ChangeAdapter) -> None:
        prepared: list[Any] = []
        error = _error_of(
            lambda: prepared.append(self._runner.read_adapter(change.name, change.folder, change.fingerprint))
        )
        self._done(AdapterRead(change, prepared[0] if prepared else None, error))


def _error_of(action: Callable[[], None]) -> LookonceError | None:
    """Returns what an action raises, as an error that shows nothing of the inside. Not counted as a failed step."""
    try:
        action()
    except LookonceError as refusal:
        return refusal
    except Exception as fault:
        incident = uuid.uuid4().hex
        logger.exception("an adapter could not be loaded, incident %s", incident)
        if is_lack_of_memory(fault):
            return OverloadedError("the server has no memory left for this adapter")
        return InternalError(f"internal error {incident}")
    return None
