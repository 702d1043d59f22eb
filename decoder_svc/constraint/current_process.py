"""The process that follows answers now. It is started when it is needed, and again after it has ended."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from decoder_svc.constraint.constraint_process import ConstraintProcess, started_process
from decoder_svc.constraint.frames import Vocabulary
from lookonce.errors import UnavailableError

_STACK_BYTES = 16 << 20


class CurrentProcess:
    """Holds the process, and what it has to be told. Thread-safe."""

    def __init__(self, load_vocabulary: Callable[[], Vocabulary]) -> None:
        """`load_vocabulary` is called before each start."""
        self._load_vocabulary = load_vocabulary
        self._process: ConstraintProcess | None = None
        self._is_closed = False
        self._lock = threading.Lock()
        # Ids of answers that nobody asks about any more, for the process to forget.
        self.ended_ids: deque[int] = deque()

    def running(self) -> ConstraintProcess:
        """Returns the process, and starts it if there is none. Raises what starting a process raises."""
        with self._lock:
            process = self._process
            if process is not None and not process.has_ended:
                return process
            if self._is_closed:
                raise UnavailableError("the server stops")
            if process is not None:
                process.close()
            self._process = None
            self._process = started_process(self._load_vocabulary, _STACK_BYTES)
            return self._process

    def is_current(self, process: ConstraintProcess) -> bool:
        """Whether no other process has been started since, and nobody has ended this one here."""
        with self._lock:
            return self._process is process

    def end(self, process: ConstraintProcess) -> None:
        """Ends a process. The next question starts a new one."""
        with self._lock:
            if self._process is process:
                self._process = None
        process.close()

    def close(self) -> None:
        """Ends the process. None is started any more."""
        self._is_closed = True
        with self._lock:
            process = self._process
        if process is not None:
            self.end(process)

    def take_ended_ids(self) -> list[int]:
        """Returns the ids of answers that the process can forget, once."""
        return [self.ended_ids.popleft() for _ in range(len(self.ended_ids))]
