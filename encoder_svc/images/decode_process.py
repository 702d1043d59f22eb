"""The process that decodes images for decode_worker.py, one at a time. `python -m` runs it.

It imports nothing that only the other side needs: each process has its own copy, and the first image waits for it. The
two sides have a socket with this protocol:

    request = file length (8 bytes) | file
    answer  = header length (8 bytes) | header as JSON, or an error's name and text | pixels, [height, width, 3] bytes
"""

from __future__ import annotations

import json
import socket
import struct
import sys
from typing import Any

from encoder_svc.images.image_decoder import decode_image
from lookonce.errors import ImageDecodeLimitError, LookonceError
from lookonce.media.image_header import ImageLimits
from lookonce.process.exact_receive import receive
from lookonce.process.limited_side import limited_side

LENGTH = struct.Struct("<Q")


def serve(connection: socket.socket, limits: ImageLimits) -> None:
    """Runs the worker side: answers requests until the other side closes."""
    while True:
        try:
            length = LENGTH.unpack(receive(connection, LENGTH.size))[0]
            data = bytes(receive(connection, length))
        except EOFError:
            return
        header, pixels = _answer(data, limits)
        encoded = json.dumps(header).encode()
        for part in (LENGTH.pack(len(encoded)), encoded, pixels):
            connection.sendall(part)


def _answer(data: bytes, limits: ImageLimits) -> tuple[dict[str, Any], bytes]:
    try:
        image, header = decode_image(data, limits)
        found = {"size": image.size, "format": header.format.value, "orientation": header.orientation}
        return found, image.tobytes()
    except MemoryError:
        return _error(
            ImageDecodeLimitError("decoding the image needs more memory than is available; send a smaller image")
        )
    except LookonceError as error:
        return _error(error)


def _error(error: LookonceError) -> tuple[dict[str, Any], bytes]:
    return {"error": type(error).__name__, "text": error.message}, b""


def main() -> None:
    """Runs the worker process. Arguments: SOCKET MEMORY_BYTES MAX_BYTES MAX_PIXELS MAX_ASPECT."""
    numbers, memory_bytes, max_bytes, max_pixels, max_aspect = sys.argv[1:]
    limits = ImageLimits(int(max_bytes), int(max_pixels), float(max_aspect))
    with limited_side(numbers, int(memory_bytes)) as (connection,):
        serve(connection, limits)


if __name__ == "__main__":
    main()
