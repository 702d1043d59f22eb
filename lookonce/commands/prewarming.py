"""Encodes many image files ahead of their first use, with a bounded number of calls and of files in memory.

Each call asks first which of its images are cached, so that a second run over the same files uploads nothing.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from lookonce.client import Client
from lookonce.errors import (
    AbortedError,
    ConfigurationError,
    InvalidParameterError,
    LookonceError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
)
from lookonce.images import Encoding, ImageRef

# Files of one call: few enough that progress shows, many enough that a look-up of cached ones costs little.
_MAX_CALL_FILES = 32
_MAX_CALL_BYTES = 16 << 20
# Errors that every further image would meet as well. All others are taken for a fault of the image.
_FAULTS_OF_ALL = (
    AbortedError,
    ConfigurationError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
)
# The flags of options that are the same for all images, by the names of their fields.
_FLAGS = {"max_pixels": "--max-pixels", "beside_others": "--beside-others"}


@dataclass(frozen=True, slots=True)
class Prewarmed:
    """The result of one file: its digest and encoding, or the error."""

    path: pathlib.Path
    # SHA-256 of the file in hex; empty if it could not be read.
    digest: str
    # None if it failed.
    encoding: Encoding | None
    # Reason of the failure, empty for none.
    error: str = ""


@dataclass(frozen=True, slots=True)
class EncodeOptions:
    """Options of all images of a run, as those of ImageRef, and the deadline of each call."""

    max_pixels: int | None
    beside_others: bool
    timeout_s: float


def prewarm(
    client: Client, paths: Sequence[pathlib.Path], options: EncodeOptions, num_parallel: int
) -> Iterator[list[Prewarmed]]:
    """Yields the results of the files, some at a time, in the order in which calls end.

    An image that the server refuses is a result with an error. Raises LookonceError for an error that the other images
    would meet as well, such as a server that cannot be reached.
    """
    if not paths:
        return
    # Finds the encoder. That there is none would look like a fault of each image.
    client.lookup([], timeout_s=options.timeout_s)
    executor = ThreadPoolExecutor(num_parallel, thread_name_prefix="encode")
    running: set[Future[list[Prewarmed]]] = set()
    try:
        for part in _parts(paths):
            running.add(executor.submit(_encoded, client, part, options))
            if len(running) > num_parallel:
                yield from _ended(running)
        while running:
            yield from _ended(running)
    finally:
        executor.shutdown(wait=False, cancel_futures=True)


def _ended(running: set[Future[list[Prewarmed]]]) -> Iterator[list[Prewarmed]]:
    """Waits for at least one call; takes those that have ended out of `running` and yields their results."""
    ended, _ = wait(running, return_when=FIRST_COMPLETED)
    running -= ended
    for future in ended:
        yield future.result()


def _parts(paths: Iterable[pathlib.Path]) -> Iterator[list[pathlib.Path]]:
    part: list[pathlib.Path] = []
    num_bytes = 0
    for path in paths:
        size_bytes = _size_bytes(path)
        if part and (len(part) == _MAX_CALL_FILES or num_bytes + size_bytes > _MAX_CALL_BYTES):
            yield part
            part, num_bytes = [], 0
        part.append(path)
        num_bytes += size_bytes
    if part:
        yield part


def _size_bytes(path: pathlib.Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        # Reading it says why.
        return 0


def _encoded(client: Client, paths: Sequence[pathlib.Path], options: EncodeOptions) -> list[Prewarmed]:
    """Encodes some files in one call, or each alone if the call fails because of one."""
    results: list[Prewarmed] = []
    images: dict[pathlib.Path, ImageRef] = {}
    for path in paths:
        try:
            images[path] = ImageRef.from_file(path, max_pixels=options.max_pixels, beside_others=options.beside_others)
        except OSError as error:
            results.append(Prewarmed(path, "", None, error.strerror or str(error)))
    return results + _called(client, images, options.timeout_s)


def _called(client: Client, images: dict[pathlib.Path, ImageRef], timeout_s: float) -> list[Prewarmed]:
    if not images:
        return []
    try:
        refs = client.encode(list(images.values()), timeout_s=timeout_s)
    except _FAULTS_OF_ALL:
        raise
    except InvalidParameterError as error:
        # All images have the same options. The server names a field of its request.
        flag = _FLAGS.get(error.field.rpartition(".")[2])
        if flag is not None:
            refusal = InvalidParameterError(flag, error.description)
            refusal.request_id = error.request_id
            raise refusal from None
        return _each_alone(client, images, error, timeout_s)
    except LookonceError as error:
        return _each_alone(client, images, error, timeout_s)
    return [Prewarmed(path, ref.hex, ref.encoding) for path, ref in zip(images, refs, strict=True)]


def _each_alone(
    client: Client, images: dict[pathlib.Path, ImageRef], error: LookonceError, timeout_s: float
) -> list[Prewarmed]:
    """Encodes each image of a failed call alone; the error is that of an image that was alone already."""
    if len(images) > 1:
        return [one for path, image in images.items() for one in _called(client, {path: image}, timeout_s)]
    return [Prewarmed(path, image.hex, None, error.message) for path, image in images.items()]
