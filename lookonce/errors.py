"""The exception tree. `status_codes.py` is the only place that maps an exception to a gRPC status.

LookonceError
├── InvalidInputError                the caller must change the request
│   ├── InvalidParameterError        a field is out of its range
│   ├── PromptEmptyError             the prompt has no token
│   ├── ContextTooLongError          more tokens than the context, the KV pool or the encoder cache can hold
│   ├── ImageCountError              images and placeholders differ in number, or too many images
│   ├── PlaceholderMismatchError     placeholder ranges differ from the images' row counts
│   ├── ImageUndecodableError        not an image, truncated, or a format outside the allow-list
│   ├── ImageTooLargeError           too many pixels or bytes, extreme aspect, zero size
│   ├── ImageDecodeLimitError        decoding went over its time or memory
│   ├── ImagePoisonousError          decoding killed its process, or the model fails on it alone
│   └── DigestMismatchError          the bytes do not hash to the digest that came with them
├── EmbeddingNotCachedError          the cache has no entry for a digest; upload the bytes
├── FingerprintMismatchError         the request asks for rows of another encoder
├── UnsupportedError                 a feature or a call that this server does not offer
├── OverloadedError                  a queue or the memory is full; try again later
├── MessageTooLargeError             a gRPC message over the limit (seen by clients; gRPC itself answers it)
├── UnavailableError                 a needed service cannot be reached, or the server drains
├── CacheAccessError                 the shared cache refuses the server's user; calling again does not help
├── DeadlineError                    the deadline passed
├── AbortedError                     AbortRequest, a cancelled call or a closed client ended the request
├── UnauthenticatedError             no token, or an invalid one
├── PermissionDeniedError            a valid token, but its role does not allow the call
├── InternalError                    a fault of the server; the message holds only an opaque id
└── StartupError                     the process refuses to start; never sent to a client
    ├── ConfigurationError           settings that are invalid or contradict each other
    └── ModelFolderError             a model folder that cannot be loaded or served correctly
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

# Characters of a message about a model folder.
_MOST_CHARS = 2000


class LookonceError(Exception):
    """Base class of all errors that users of the SDK and operators see.

    `message` names the fault, the value, the limit and the remedy. It never contains library text, paths or addresses.
    `metadata` is sent in ErrorInfo.metadata.
    """

    # Name of the gRPC status code, and the reason in ErrorInfo by which clients tell all exceptions apart. An error of
    # a newer server or a proxy may have another code or reason than its class.
    code: str = "INTERNAL"
    reason: str = "INTERNAL"
    # Id of the failed call in the server's logs; None for an error that the client raised without a call.
    request_id: str | None = None
    # Whether the message is another program's text, such as gRPC's: it may show addresses.
    text_is_foreign: bool = False
    # Path of the wrong field in the gRPC contract, where the message has the name of the SDK's argument; else empty.
    contract_field: str = ""
    # Pause before the next try that the server advises, seconds; None: it advises none.
    retry_after_s: float | None = None

    def __init__(self, message: str, *, metadata: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.metadata: dict[str, str] = dict(metadata or {})

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles and copies all attributes. Exception's own method would call `__init__` with `args` alone."""
        return _restored, (type(self), self.args), vars(self)


def _restored(kind: type[LookonceError], args: tuple[object, ...]) -> LookonceError:
    """Returns an error without attributes, which pickle sets afterwards."""
    return kind.__new__(kind, *args)


class InvalidInputError(LookonceError):
    """The request is invalid; the caller must change it."""

    code, reason = "INVALID_ARGUMENT", "INVALID_INPUT"


class InvalidParameterError(InvalidInputError):
    """A field is missing, out of range or contradicts another one."""

    code, reason = "INVALID_ARGUMENT", "INVALID_PARAMETER"

    def __init__(self, field: str, description: str) -> None:
        super().__init__(f"{field}: {description}", metadata={"field": field})
        self.field = field
        self.description = description


class PromptEmptyError(InvalidInputError):
    """The prompt has no token."""

    code, reason = "INVALID_ARGUMENT", "PROMPT_EMPTY"


class ContextTooLongError(InvalidInputError):
    """The request exceeds a fixed limit; the message names the value and the limit."""

    code, reason = "INVALID_ARGUMENT", "CONTEXT_TOO_LONG"


class ImageCountError(InvalidInputError):
    """Images and placeholders differ in number, or there are more images than the limit."""

    code, reason = "INVALID_ARGUMENT", "IMAGE_COUNT"


class PlaceholderMismatchError(InvalidInputError):
    """Placeholder tokens do not match the rows of the images."""

    code, reason = "INVALID_ARGUMENT", "PLACEHOLDER_MISMATCH"


class ImageUndecodableError(InvalidInputError):
    """The file is broken, or is not an image of an accepted format."""

    code, reason = "INVALID_ARGUMENT", "IMAGE_UNDECODABLE"


class ImageTooLargeError(InvalidInputError):
    """The image has too many bytes or pixels, an extreme aspect ratio, or a side of zero pixels."""

    code, reason = "INVALID_ARGUMENT", "IMAGE_TOO_LARGE"


class ImageDecodeLimitError(InvalidInputError):
    """Decoding the image needs more time or memory than the limit."""

    code, reason = "INVALID_ARGUMENT", "IMAGE_DECODE_LIMIT"


class ImagePoisonousError(InvalidInputError):
    """The image killed the process that decoded it, or the model fails on this image alone."""

    code, reason = "INVALID_ARGUMENT", "IMAGE_POISONOUS"


@contextmanager
def located_in_image(index: int) -> Iterator[None]:
    """Adds the position of the image in its request to the metadata of an error that the block raises."""
    try:
        yield
    except InvalidInputError as error:
        error.metadata["index"] = str(index)
        raise


class DigestMismatchError(InvalidInputError):
    """The bytes do not hash to the digest that was sent with them. The server stores nothing."""

    code, reason = "INVALID_ARGUMENT", "DIGEST_MISMATCH"


class EmbeddingNotCachedError(LookonceError):
    """The cache has no entry for a digest, which may be unknown, evicted or another tenant's: the answer is the same.

    `indexes` are the positions of the missing images in the request.
    """

    code, reason = "NOT_FOUND", "EMBEDDING_NOT_CACHED"

    def __init__(self, message: str, *, indexes: Sequence[int] = ()) -> None:
        super().__init__(message, metadata={"indexes": ",".join(str(index) for index in indexes)})
        self.indexes = tuple(indexes)


class FingerprintMismatchError(LookonceError):
    """The request names another encoder fingerprint than the one this server has."""

    code, reason = "FAILED_PRECONDITION", "FINGERPRINT_MISMATCH"


class UnsupportedError(LookonceError):
    """The server does not offer this feature or this call of the contract."""

    code, reason = "UNIMPLEMENTED", "UNSUPPORTED"


class OverloadedError(LookonceError):
    """A bounded queue or the memory is full. `retry_after_s` is the advised pause before the next try, in seconds."""

    code, reason = "RESOURCE_EXHAUSTED", "OVERLOADED"
    retry_after_s: float

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class MessageTooLargeError(LookonceError):
    """A gRPC message exceeds the size limit."""

    code, reason = "RESOURCE_EXHAUSTED", "MESSAGE_TOO_LARGE"


class UnavailableError(LookonceError):
    """A needed service cannot be reached at the moment. Safe to retry.

    `retry_after_s` is the advised pause before the next try, in seconds; None: another replica may answer at once.
    """

    code, reason = "UNAVAILABLE", "UNAVAILABLE"

    def __init__(
        self, message: str, *, metadata: Mapping[str, str] | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message, metadata=metadata)
        self.retry_after_s = retry_after_s


class CacheAccessError(LookonceError):
    """The shared cache refuses the server's user a command of an operator's call, or its password.

    The call fails again until the user's rights are changed.
    """

    code, reason = "FAILED_PRECONDITION", "CACHE_ACCESS_DENIED"


class DeadlineError(LookonceError):
    """The deadline passed before the answer was complete."""

    code, reason = "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED"


class AbortedError(LookonceError):
    """AbortRequest, the end of the call or the end of the client cancelled the request."""

    code, reason = "CANCELLED", "ABORTED"


class UnauthenticatedError(LookonceError):
    """The call has no token, or one that the server does not accept."""

    code, reason = "UNAUTHENTICATED", "UNAUTHENTICATED"


class PermissionDeniedError(LookonceError):
    """The caller's role does not allow this call."""

    code, reason = "PERMISSION_DENIED", "PERMISSION_DENIED"


class InternalError(LookonceError):
    """A fault of the server. Its log has the details under the opaque id in the message."""

    code, reason = "INTERNAL", "INTERNAL"


class StartupError(LookonceError):
    """The process refuses to start."""

    code, reason = "FAILED_PRECONDITION", "STARTUP"


class ConfigurationError(StartupError):
    """Settings are invalid or contradict each other."""

    code, reason = "FAILED_PRECONDITION", "CONFIGURATION"


class ModelFolderError(StartupError):
    """The model folder cannot be loaded, or not be served correctly.

    A message may quote names from the folder's files. It is made fit for a terminal: control characters are escaped,
    and the middle of a long message is left out.
    """

    code, reason = "FAILED_PRECONDITION", "MODEL_FOLDER"

    def __init__(self, message: str, *, metadata: Mapping[str, str] | None = None) -> None:
        if len(message) > _MOST_CHARS:
            message = f"{message[: _MOST_CHARS // 2]} … {message[-_MOST_CHARS // 2 :]}"
        printable = (each if each.isprintable() else repr(each)[1:-1] for each in message)
        super().__init__("".join(printable), metadata=metadata)
