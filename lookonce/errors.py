"""The exception tree. What each one becomes on the wire stands in `status_codes.py`, nowhere else.

LookonceError
├── InvalidInputError                the caller must change the request
│   ├── InvalidParameterError        a field is out of its range
│   ├── PromptEmptyError             nothing to generate from
│   ├── ContextTooLongError          more tokens than the context, the KV pool or the encoder cache can hold
│   ├── ImageCountError              images and placeholders differ in number, or too many images
│   ├── PlaceholderMismatchError     placeholder ranges differ from the images' row counts
│   ├── ImageUndecodableError        not an image, truncated, or a format outside the allow-list
│   ├── ImageTooLargeError           too many pixels or bytes, extreme aspect, zero size
│   ├── ImageDecodeLimitError        decoding went over its time or memory
│   ├── ImagePoisonousError          decoding killed its process, or the model fails on it alone
│   └── DigestMismatchError          the bytes do not hash to the digest that came with them
├── EmbeddingNotCachedError          a digest that the cache does not hold; upload the bytes
├── FingerprintMismatchError         rows of another encoder were asked for
├── UnsupportedError                 a known feature that this server does not offer
├── OverloadedError                  a queue is full; come back later
├── MessageTooLargeError             a gRPC message over the limit (seen by clients; gRPC itself answers it)
├── UnavailableError                 a part that is needed cannot be reached, or the server drains
├── DeadlineError                    the deadline passed
├── AbortedError                     AbortRequest or a cancelled call ended the request
├── UnauthenticatedError             no or a bad token
├── PermissionDeniedError            a good token, whose role does not allow the call
├── InternalError                    our fault; the message holds an opaque id only
└── StartupError                     refuses to start; never leaves the process
    ├── ConfigurationError           settings that contradict each other or the promises
    └── ModelFolderError             a model folder that cannot be served rightly
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager


class LookonceError(Exception):
    """Base of every error that a user of the SDK or an operator can meet.

    `message` says what was wrong, the value, the limit and what to do; it never holds library text, paths or addresses.
    `metadata` travels in ErrorInfo.metadata.
    """

    def __init__(self, message: str, *, metadata: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.metadata: dict[str, str] = dict(metadata or {})


class InvalidInputError(LookonceError):
    """The request itself is wrong."""


class InvalidParameterError(InvalidInputError):
    """A field is missing, out of range or contradicts another one."""

    def __init__(self, field: str, description: str) -> None:
        super().__init__(f"{field}: {description}", metadata={"field": field})
        self.field = field
        self.description = description


class PromptEmptyError(InvalidInputError):
    """The prompt has no token."""


class ContextTooLongError(InvalidInputError):
    """The request can never fit; the message names value and limit."""


class ImageCountError(InvalidInputError):
    """Images and placeholders differ in number, or there are more images than the limit."""


class PlaceholderMismatchError(InvalidInputError):
    """Placeholder tokens do not match the rows of the images."""


class ImageUndecodableError(InvalidInputError):
    """Not an image of an accepted format, or a broken one."""


class ImageTooLargeError(InvalidInputError):
    """Too many bytes or pixels, an extreme aspect ratio, or a side of zero."""


class ImageDecodeLimitError(InvalidInputError):
    """Decoding needed more time or memory than an image may take."""


class ImagePoisonousError(InvalidInputError):
    """The process that decoded the image died of it, or the model fails on it and on no other one."""


@contextmanager
def located_in_image(index: int) -> Iterator[None]:
    """Notes in an image's error which of a request's images it was."""
    try:
        yield
    except InvalidInputError as error:
        error.metadata["index"] = str(index)
        raise


class DigestMismatchError(InvalidInputError):
    """The bytes do not hash to the digest that came with them. Nothing was stored."""


class EmbeddingNotCachedError(LookonceError):
    """Unknown, evicted and foreign digests are one and the same answer. `indexes` are the positions in the request."""

    def __init__(self, message: str, *, indexes: Sequence[int] = ()) -> None:
        super().__init__(message, metadata={"indexes": ",".join(str(index) for index in indexes)})
        self.indexes = tuple(indexes)


class FingerprintMismatchError(LookonceError):
    """The asked-for encoder fingerprint is not the one served here."""


class UnsupportedError(LookonceError):
    """A feature of the contract that this server does not offer."""


class OverloadedError(LookonceError):
    """A bounded queue is full. `retry_after_s` is advice in seconds."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class MessageTooLargeError(LookonceError):
    """A gRPC message over the size limit."""


class UnavailableError(LookonceError):
    """Something that is needed cannot be reached just now. Safe to retry."""


class DeadlineError(LookonceError):
    """The deadline passed before the answer was complete."""


class AbortedError(LookonceError):
    """The request was aborted."""


class UnauthenticatedError(LookonceError):
    """No token, or one that is not accepted."""


class PermissionDeniedError(LookonceError):
    """A call that the caller's role does not allow."""


class InternalError(LookonceError):
    """A fault of the server. The log holds the details under the opaque id."""


class StartupError(LookonceError):
    """The process must not start."""


class ConfigurationError(StartupError):
    """Settings that contradict each other or a promise."""


class ModelFolderError(StartupError):
    """A model folder that cannot be loaded, or not be served rightly."""
