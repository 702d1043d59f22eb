"""Headers of a caller's own: metadata that a client sends with each call, for gateways and meshes on the way."""

from __future__ import annotations

import re
from collections.abc import Mapping

from lookonce.errors import ConfigurationError
from lookonce.identity import AFFINITY_KEY, REQUEST_ID_KEY

_NAME = re.compile(r"[a-z0-9_.-]+")
# Set by the client, by arguments of their own, or by OpenTelemetry.
_TAKEN = frozenset(
    {"authorization", REQUEST_ID_KEY, AFFINITY_KEY, "traceparent", "tracestate", "te", "content-type", "user-agent"}
)
# Far below the 16 KiB that servers accept for all headers together.
_MAX_BYTES = 8192


def checked_headers(headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Returns headers as metadata. Names become lower case.

    Raises ConfigurationError for names and values that gRPC refuses at the call, for names of which there would be two,
    and for more than 8 KiB.
    """
    given: object = headers
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"headers must be a mapping of names to texts, got {type(given).__name__}")
    pairs: dict[str, str] = {}
    for name, value in given.items():
        key = name.lower() if isinstance(name, str) else ""
        if not _NAME.fullmatch(key) or key.startswith(("grpc-", ":")) or key.endswith("-bin"):
            raise ConfigurationError(f"{name!r} is no name of a header with text: use a-z, 0-9, '_', '-' and '.'")
        if key in _TAKEN:
            raise ConfigurationError(f"the header {key} is set by the client; the token and the request id are options")
        if key in pairs:
            raise ConfigurationError(f"the header {key} is given twice")
        # The value may be a secret, so the error does not show it.
        if not isinstance(value, str) or not value.isascii() or not value.isprintable() or value != value.strip():
            raise ConfigurationError(f"the value of the header {key} must be printable ASCII without spaces around it")
        pairs[key] = value
    if sum(len(key) + len(value) for key, value in pairs.items()) > _MAX_BYTES:
        raise ConfigurationError(f"the headers have more than {_MAX_BYTES} bytes")
    return tuple(pairs.items())
