"""Decodes images in a process of its own, with bounded memory, that its owner may kill. `python -m` runs the worker.

An image file is hostile input to a large C library: whatever it does there must not take the encoder with it. The
worker has nothing but Pillow, one image at a time and a socket:

    at the start one byte: ready
    request = file length (8 bytes) | file
    answer  = header length (8 bytes) | header as JSON, or an error's name and text | pixels, [height, width, 3] bytes
"""

from __future__ import annotations

import json
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
from typing import Any

import PIL.Image

from encoder_svc.images.image_decoder import decode_image
from lookonce.errors import (
    ImageDecodeLimitError,
    ImagePoisonousError,
    ImageTooLargeError,
    ImageUndecodableError,
    InternalError,
    LookonceError,
    UnavailableError,
)
from lookonce.media.image_header import ImageFormat, ImageHeader, ImageLimits

_LENGTH = struct.Struct("<Q")
_READY = b"r"
_START_TIMEOUT_S = 30.0
# Between closing its socket and being gone.
_END_TIMEOUT_S = 1.0
# What an image does to its process ends it by other signals; more memory than it may have is an error of Python's.
_FROM_OUTSIDE = frozenset({-signal.SIGKILL, -signal.SIGTERM})
# Sizes, or an error's text.
_MAX_HEADER_BYTES = 16 << 10
_ERRORS = {error.__name__: error for error in (ImageDecodeLimitError, ImageTooLargeError, ImageUndecodableError)}
# What Python, Pillow and its libraries map before any image.
_BASE_BYTES = 512 << 20
# At the worst an image is there four times at four bytes per pixel: decoded, converted, composed and turned.
_BYTES_PER_PIXEL = 16


class DecodeWorker:
    """One worker process, started when it is first needed and again after it died. Belongs to one thread."""

    def __init__(self, limits: ImageLimits, timeout_s: float) -> None:
        """`timeout_s`: longest time one image may take, seconds."""
        self._limits = limits
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        """Of the running worker; None where there is none."""
        return None if self._process is None else self._process.pid

    def decode(self, data: bytes) -> tuple[PIL.Image.Image, ImageHeader]:
        """The first frame, upright, as RGB.

        Raises ImageUndecodableError, ImageTooLargeError, ImageDecodeLimitError for an image that takes too long or too
        much memory, ImagePoisonousError for one under which the worker died, and UnavailableError when it was ended
        from outside, as by a kernel that is short of memory.
        """
        connection = self._connected()
        try:
            return _exchange(connection, data, self._timeout_s)
        except TimeoutError:
            self.close()
            raise ImageDecodeLimitError(
                f"decoding the image takes more than {self._timeout_s:g} s; save it in a simpler form"
            ) from None
        except (EOFError, OSError):
            was_killed = self._exit_status() in _FROM_OUTSIDE
            self.close()
            if was_killed:
                raise UnavailableError("the process that decoded the image was ended from outside; try again") from None
            raise ImagePoisonousError("decoding the image killed its process; the file is not accepted") from None

    def close(self) -> None:
        """Kills the worker; the next image starts another."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _exit_status(self) -> int | None:
        """Of a worker that has closed its end; None while it runs."""
        assert self._process is not None, "there is one at the other end"
        try:
            return self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return None

    def _connected(self) -> socket.socket:
        if self._process is not None and self._process.poll() is not None:
            # Killed from outside while it had nothing to do.
            self.close()
        if self._socket is None:
            ours, theirs = socket.socketpair()
            with theirs:
                limits = self._limits
                numbers = (
                    theirs.fileno(),
                    memory_limit(limits),
                    limits.max_bytes,
                    limits.max_pixels,
                    limits.max_aspect,
                )
                arguments = [str(number) for number in numbers]
                # Isolated and without the parent's environment: no secret of the service is in there.
                command = [sys.executable, "-I", "-m", "encoder_svc.images.decode_worker", *arguments]
                self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env={})
            self._socket = ours
            self._wait_until_ready(ours)
        return self._socket

    def _wait_until_ready(self, connection: socket.socket) -> None:
        """A worker that cannot start is our fault, not the image's."""
        try:
            _receive(connection, len(_READY), time.monotonic() + _START_TIMEOUT_S)
        except (EOFError, OSError) as error:
            self.close()
            raise InternalError("a decoding process did not start") from error


def memory_limit(limits: ImageLimits) -> int:
    """Bytes of address space that a worker may have."""
    return _BASE_BYTES + limits.max_bytes + _BYTES_PER_PIXEL * limits.max_pixels


def _exchange(connection: socket.socket, data: bytes, timeout_s: float) -> tuple[PIL.Image.Image, ImageHeader]:
    deadline_s = time.monotonic() + timeout_s
    for part in (_LENGTH.pack(len(data)), data):
        connection.settimeout(max(0.001, deadline_s - time.monotonic()))
        connection.sendall(part)
    length = _LENGTH.unpack(_receive(connection, _LENGTH.size, deadline_s))[0]
    if length > _MAX_HEADER_BYTES:
        raise EOFError
    header = json.loads(_receive(connection, length, deadline_s))
    if "error" in header:
        raise _ERRORS[header["error"]](header["text"])
    size = header["size"]
    pixels = _receive(connection, 3 * size[0] * size[1], deadline_s)
    image = PIL.Image.frombuffer("RGB", size, pixels, "raw", "RGB", 0, 1)
    return image, ImageHeader(ImageFormat(header["format"]), size[0], size[1], header["orientation"])


def _receive(connection: socket.socket, num_bytes: int, deadline_s: float | None) -> bytearray:
    """Exactly so many bytes. Raises EOFError when the other side ends, TimeoutError."""
    data = bytearray(num_bytes)
    view = memoryview(data)
    while view:
        connection.settimeout(None if deadline_s is None else max(0.001, deadline_s - time.monotonic()))
        received = connection.recv_into(view)
        if not received:
            raise EOFError
        view = view[received:]
    return data


def serve(connection: socket.socket, limits: ImageLimits) -> None:
    """The worker: answers until the other side closes."""
    while True:
        try:
            length = _LENGTH.unpack(_receive(connection, _LENGTH.size, None))[0]
            data = bytes(_receive(connection, length, None))
        except EOFError:
            return
        header, pixels = _answer(data, limits)
        encoded = json.dumps(header).encode()
        for part in (_LENGTH.pack(len(encoded)), encoded, pixels):
            connection.sendall(part)


def _answer(data: bytes, limits: ImageLimits) -> tuple[dict[str, Any], bytes]:
    try:
        image, header = decode_image(data, limits)
        found = {"size": image.size, "format": header.format.value, "orientation": header.orientation}
        return found, image.tobytes()
    except MemoryError:
        return _error(ImageDecodeLimitError("decoding the image needs more memory than there is; send it smaller"))
    except LookonceError as error:
        return _error(error)


def _error(error: LookonceError) -> tuple[dict[str, Any], bytes]:
    return {"error": type(error).__name__, "text": error.message}, b""


def main() -> None:
    """`decode_worker FD MEMORY_BYTES MAX_BYTES MAX_PIXELS MAX_ASPECT`."""
    fd, memory_bytes, max_bytes, max_pixels, max_aspect = sys.argv[1:]
    limits = ImageLimits(int(max_bytes), int(max_pixels), float(max_aspect))
    resource.setrlimit(resource.RLIMIT_AS, (int(memory_bytes), int(memory_bytes)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Ctrl-C in a terminal reaches all processes; the owner says when this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=int(fd)) as connection:
        connection.sendall(_READY)
        serve(connection, limits)


if __name__ == "__main__":
    main()
