"""A running process with llguidance, as its owner sees it. guidance_process.py runs in it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from decoder_svc.constraint.frames import Check, Checked, Followed, FrameReader, Vocabulary, encoded, received
from decoder_svc.constraint.mask_numbers import NumberedMasks
from decoder_svc.scheduling.sampling_params import Constraint
from lookonce.errors import InternalError, UnavailableError, UnsupportedError
from lookonce.process.limited_process import RETRY_S, KilledProcessError, LimitedProcess, send

# Address space: Python, the vocabulary's tree (0.2 GB for 150,000 tokens), and the automata.
MEMORY_BYTES = 4 << 30
# A vocabulary of 150,000 tokens is read in about a second.
_LOAD_TIMEOUT_S = 60.0
# Processes that are started for one caller, if each is killed from outside while it starts.
_MAX_STARTS = 3


class ConstraintProcess:
    """A process that compiles constraints on one thread and follows answers on another one."""

    def __init__(self, vocabulary: Vocabulary, stack_bytes: int) -> None:
        """Starts the process. `stack_bytes` is the stack of each of its threads.

        Raises InternalError if it does not start, UnavailableError if that takes too long, KilledProcessError if it is
        killed meanwhile, and UnsupportedError for a vocabulary that llguidance cannot use.
        """
        arguments = (MEMORY_BYTES, stack_bytes)
        self._process = LimitedProcess(
            "compiles constraints", "decoder_svc.constraint.guidance_process", arguments, num_sockets=3
        )
        self._checking = threading.Lock()
        # The outcomes of what is followed.
        self.frames = FrameReader(self.follow_socket)
        self._masks = NumberedMasks()
        try:
            self._load(vocabulary)
        except BaseException:
            self._process.close()
            raise

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.has_ended

    @property
    def follow_socket(self) -> socket.socket:
        """The socket on which answers are followed."""
        return self._process.sockets[2]

    def masks(self, outcome: Followed) -> list[bytes]:
        """Returns the masks of an outcome. Each outcome must be read once, in order."""
        return self._masks.masks(outcome.masks, outcome.new_masks)

    def check(self, constraint: Constraint, wait_s: Callable[[], float]) -> str | None:
        """Returns the reason why a constraint is refused, or None.

        Raises EOFError or OSError when the process has ended, and the TimeoutError of `wait_s`, after which the answer
        is still to come: the process must be closed.
        """
        connection = self._process.sockets[1]
        with self._checking:
            send(connection, encoded(Check(constraint.kind.value, constraint.text)), wait_s)
            return received(connection, Checked, wait_s).refusal

    def was_killed_from_outside(self) -> bool:
        """Whether a process that has closed its sockets was killed by somebody else, and did not crash."""
        return self._process.was_killed_from_outside()

    def close(self) -> None:
        """Ends the process, also while it is asked."""
        self._process.stop()
        with self._checking:
            self._process.close()

    def _load(self, vocabulary: Vocabulary) -> None:
        connection, deadline_s = self._process.sockets[0], time.monotonic() + _LOAD_TIMEOUT_S

        def wait_s() -> float:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            return left_s

        try:
            send(connection, encoded(vocabulary), wait_s)
            refusal = received(connection, Checked, wait_s).refusal
        except TimeoutError:
            raise UnavailableError(
                "the server is too busy: the vocabulary for structured output was not loaded in time; try again",
                retry_after_s=RETRY_S,
            ) from None
        except (EOFError, OSError) as error:
            if self._process.was_killed_from_outside():
                raise self._process.killed_error() from error
            raise InternalError("the process that compiles constraints ended while it loaded the vocabulary") from error
        if refusal is not None:
            raise UnsupportedError(f"this model's tokenizer cannot be used for structured output: {refusal}")


def started_process(load_vocabulary: Callable[[], Vocabulary], stack_bytes: int) -> ConstraintProcess:
    """Starts a process, and another one in the place of one that is killed from outside while it starts.

    Raises what the constructor raises.
    """
    for _ in range(_MAX_STARTS - 1):
        with suppress(KilledProcessError):
            return ConstraintProcess(load_vocabulary(), stack_bytes)
    return ConstraintProcess(load_vocabulary(), stack_bytes)
