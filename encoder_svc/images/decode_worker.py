"""Decodes images in a separate process with bounded memory and time.

An image file is hostile input to a large C library; a crash there must not end the encoder. The process is
decode_process.py, which says what the two send each other.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress

import PIL.Image

from encoder_svc.images.decode_clock import DecodeClock, DecodeTimeLimits
from encoder_svc.images.decode_process import LENGTH, READY
from lookonce.errors import (
    ImageDecodeLimitError,
    ImagePoisonousError,
    ImageTooLargeError,
    ImageUndecodableError,
    InternalError,
    LookonceError,
    UnavailableError,
    UnsupportedError,
)
from lookonce.media.image_header import ImageFormat, ImageHeader, ImageLimits
from lookonce.process.exact_receive import receive

_START_TIMEOUT_S = 30.0
_NOT_STARTED = "a decoding process did not start"
# Maximum time between the worker's closing of its socket and its exit.
_END_TIMEOUT_S = 1.0
# Advised pause for the caller of an image whose decoding process got too little processor time, seconds.
_RETRY_S = 1.0
# Signals from the kernel's out-of-memory killer or an operator. A crash ends the process by other signals, and a worker
# that exceeds its memory limit gets a MemoryError.
_FROM_OUTSIDE = frozenset({-signal.SIGKILL, -signal.SIGTERM})
# The header holds an image's size, or an error's text.
_MAX_HEADER_BYTES = 16 << 10
_ERRORS: dict[str, type[LookonceError]] = {
    error.__name__: error
    for error in (ImageDecodeLimitError, ImageTooLargeError, ImageUndecodableError, UnsupportedError)
}
# Address space of Python, Pillow and its libraries before any image.
_BASE_BYTES = 512 << 20
# In the worst case four copies exist at four bytes per pixel: decoded, converted, composed and turned.
_BYTES_PER_PIXEL = 16


class DecodeWorker:
    """One worker process, started on first use and again after its death. Used by one thread only."""

    def __init__(self, limits: ImageLimits, time_limits: DecodeTimeLimits) -> None:
        self._limits = limits
        self._time_limits = time_limits
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the running worker; None when there is none."""
        return None if self._process is None else self._process.pid

    def decode(self, data: bytes) -> tuple[PIL.Image.Image, ImageHeader]:
        """Returns the first frame, upright, as RGB, and the header.

        Raises ImageUndecodableError, ImageTooLargeError, ImageDecodeLimitError for an image that takes too much time or
        memory, ImagePoisonousError for one that crashed the worker, UnavailableError when the worker was killed from
        outside, for example by the kernel's out-of-memory killer, or got too little processor time, and
        UnsupportedError for a format whose package is not installed.
        """
        connection = self._connected()
        assert self._process is not None, "a connection has a process"
        clock = DecodeClock(self._process.pid, self._time_limits)
        try:
            return _exchange(connection, data, clock)
        except TimeoutError:
            is_image_slow = clock.is_cpu_used_up
            self.close()
            if is_image_slow:
                raise ImageDecodeLimitError(
                    f"decoding the image takes more than {self._time_limits.cpu_s:g} s of processor time; "
                    "save it in a simpler form"
                ) from None
            raise UnavailableError(
                f"the server is too busy: in {self._time_limits.wall_s:g} s the image was not decoded; try again",
                retry_after_s=_RETRY_S,
            ) from None
        except (EOFError, OSError):
            was_killed = self._exit_status() in _FROM_OUTSIDE
            self.close()
            if was_killed:
                raise UnavailableError(
                    "the process that decoded the image was killed from outside; try again"
                ) from None
            raise ImagePoisonousError("decoding the image killed its process; the file is not accepted") from None
        except LookonceError:
            raise
        except BaseException:
            # The rest of the answer is still in the socket, and must not become the answer for another image.
            self.close()
            raise

    def close(self) -> None:
        """Kills the worker; the next image starts a new one."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _exit_status(self) -> int | None:
        """Exit status of a worker that has closed its socket; None while it still runs."""
        assert self._process is not None, "only called after a connection was made"
        try:
            return self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return None

    def _connected(self) -> socket.socket:
        if self._process is not None and self._process.poll() is not None:
            # It was killed from outside while idle.
            self.close()
        if self._socket is None:
            self._socket = self._started()
            self._wait_until_ready(self._socket)
        return self._socket

    def _started(self) -> socket.socket:
        """Starts the worker and returns the socket to it. Raises InternalError, with no socket open, if that fails."""
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise InternalError(_NOT_STARTED) from error
        limits = self._limits
        with theirs, ExitStack() as unless_started:
            unless_started.enter_context(ours)
            numbers = (
                theirs.fileno(),
                memory_limit(limits),
                limits.max_bytes,
                limits.max_pixels,
                limits.max_aspect,
            )
            arguments = [str(number) for number in numbers]
            # Isolated (-I) and with an empty environment, so that the worker sees no secret of the service.
            command = [sys.executable, "-I", "-m", "encoder_svc.images.decode_process", *arguments]
            try:
                self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env={})
            except OSError as error:
                raise InternalError(_NOT_STARTED) from error
            unless_started.pop_all()
        return ours

    def _wait_until_ready(self, connection: socket.socket) -> None:
        """Raises InternalError for a worker that does not start, and UnavailableError for one that takes too long.

        Neither is the image's fault.
        """
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        try:
            receive(connection, len(READY), lambda: _left_until(deadline_s))
        except TimeoutError:
            self.close()
            raise UnavailableError(
                "the server is too busy: a decoding process did not start in time; try again", retry_after_s=_RETRY_S
            ) from None
        except (EOFError, OSError) as error:
            self.close()
            raise InternalError(_NOT_STARTED) from error


def memory_limit(limits: ImageLimits) -> int:
    """Maximum address space of a worker, bytes."""
    return _BASE_BYTES + limits.max_bytes + _BYTES_PER_PIXEL * limits.max_pixels


def _exchange(connection: socket.socket, data: bytes, clock: DecodeClock) -> tuple[PIL.Image.Image, ImageHeader]:
    for part in (LENGTH.pack(len(data)), data):
        _send(connection, part, clock.wait_s)
    length = LENGTH.unpack(receive(connection, LENGTH.size, clock.wait_s))[0]
    if length > _MAX_HEADER_BYTES:
        raise EOFError
    header = json.loads(receive(connection, length, clock.wait_s))
    if "error" in header:
        raise _ERRORS[header["error"]](header["text"])
    size = header["size"]
    pixels = receive(connection, 3 * size[0] * size[1], clock.wait_s)
    image = PIL.Image.frombuffer("RGB", size, pixels, "raw", "RGB", 0, 1)
    return image, ImageHeader(ImageFormat(header["format"]), size[0], size[1], header["orientation"])


def _send(connection: socket.socket, data: bytes, wait_s: Callable[[], float]) -> None:
    """Sends all of `data`. Raises the TimeoutError of `wait_s`, which is asked how long to wait each time."""
    view = memoryview(data)
    while view:
        connection.settimeout(wait_s())
        with suppress(TimeoutError):
            view = view[connection.send(view) :]


def _left_until(deadline_s: float) -> float:
    """Returns the time that is left, seconds. Raises TimeoutError when none is."""
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s
