"""The ways in which calls of a FakeServer fail."""

from __future__ import annotations

from typing import Any, NoReturn

from grpc_status import rpc_status

from lookonce.errors import LookonceError, UnsupportedError
from lookonce.status_codes import to_status


def abort(context: Any, error: LookonceError) -> NoReturn:
    """Ends a call with the status of an error, as the services do. Raises gRPC's exception for it."""
    context.abort_with_status(rpc_status.to_status(to_status(error)))
    raise error


def not_offered() -> UnsupportedError:
    """Returns the error for what a FakeServer does not offer."""
    return UnsupportedError("a FakeServer does not offer this")
