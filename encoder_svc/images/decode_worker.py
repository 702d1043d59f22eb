"""Decodes images in a separate process with bounded memory and time.

An image file is hostile input to a large C library; a crash there must not end the encoder. The process is
decode_process.py, which says what the two send each other.
"""

from __future__ import annotations

import json
import socket

import PIL.Image

from encoder_svc.images.decode_process import LENGTH
from lookonce.errors import (
    ImageDecodeLimitError,
    ImagePoisonousError,
    ImageTooLargeError,
    ImageUndecodableError,
    LookonceError,
    UnavailableError,
    UnsupportedError,
)
from lookonce.media.image_header import ImageFormat, ImageHeader, ImageLimits
from lookonce.process.exact_receive import receive
from lookonce.process.limited_process import RETRY_S, LimitedProcess, send
from lookonce.process.process_clock import ProcessClock, TimeLimits

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

    def __init__(self, limits: ImageLimits, time_limits: TimeLimits) -> None:
        self._limits = limits
        self._time_limits = time_limits
        self._process: LimitedProcess | None = None

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
        process = self._running()
        clock = ProcessClock(process.pid, self._time_limits)
        try:
            return _exchange(process.sockets[0], data, clock)
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
                retry_after_s=RETRY_S,
            ) from None
        except (EOFError, OSError):
            was_killed = process.was_killed_from_outside()
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
        if self._process is not None:
            self._process.close()
            self._process = None

    def _running(self) -> LimitedProcess:
        """Returns the worker's process. Raises InternalError or UnavailableError, which are not the image's fault."""
        if self._process is not None and self._process.has_ended:
            # It was killed from outside while idle.
            self.close()
        if self._process is None:
            limits = self._limits
            numbers = (memory_limit(limits), limits.max_bytes, limits.max_pixels, limits.max_aspect)
            self._process = LimitedProcess("decodes images", "encoder_svc.images.decode_process", numbers)
        return self._process


def memory_limit(limits: ImageLimits) -> int:
    """Maximum address space of a worker, bytes."""
    return _BASE_BYTES + limits.max_bytes + _BYTES_PER_PIXEL * limits.max_pixels


def _exchange(connection: socket.socket, data: bytes, clock: ProcessClock) -> tuple[PIL.Image.Image, ImageHeader]:
    for part in (LENGTH.pack(len(data)), data):
        send(connection, part, clock.wait_s)
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
