"""Counts an engine's failures, and tells those that its requests caused from those by which it is lost."""

from __future__ import annotations

import logging
import uuid

from lookonce.errors import InternalError, LookonceError, OverloadedError
from lookonce.model.lack_of_memory import is_lack_of_memory

logger = logging.getLogger(__name__)

# A failing step ends its own requests only. After this many failures in a row the engine is taken to be broken.
_MAX_CONSECUTIVE_FAILURES = 3
# A lack of memory is the fault of the requests or of another process as often as of this one, and ends with them. After
# this many failures in a row the memory is taken to be lost in this process, which a new one gets back.
_MAX_CONSECUTIVE_MEMORY_FAILURES = 20


class FailureCount:
    """The failures of one engine. Its thread uses it; others may read numbers."""

    def __init__(self) -> None:
        # Failures since the latest step that computed something: those for lack of memory, and all others.
        self._num_in_a_row = 0
        self._num_of_memory_in_a_row = 0
        # Failures for lack of memory since the start.
        self.num_memory_errors = 0

    def answer_to(self, error: Exception, action: str) -> LookonceError:
        """Logs and counts a failure, and returns the error for the requests that it ends."""
        incident = uuid.uuid4().hex
        logger.exception("%s failed, incident %s", action, incident)
        if is_lack_of_memory(error):
            self._num_of_memory_in_a_row += 1
            self.num_memory_errors += 1
            return OverloadedError("the server has no memory left for this request; retry later, or send less at once")
        self._num_in_a_row += 1
        return InternalError(f"internal error {incident}")

    def note_success(self) -> None:
        """Notes a step that computed something."""
        self._num_in_a_row = self._num_of_memory_in_a_row = 0

    def check(self) -> None:
        """Raises RuntimeError, which ends the engine, after too many failures in a row."""
        if self._num_in_a_row >= _MAX_CONSECUTIVE_FAILURES:
            raise RuntimeError(f"{self._num_in_a_row} engine steps failed in a row")
        if self._num_of_memory_in_a_row >= _MAX_CONSECUTIVE_MEMORY_FAILURES:
            raise RuntimeError(f"{self._num_of_memory_in_a_row} engine steps in a row had too little memory")
