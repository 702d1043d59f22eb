"""Which request ids are being served, from arrival to answer. Event loop only."""

from __future__ import annotations

import itertools
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from decoder_svc.scheduling.request import RequestId
from lookonce.errors import InvalidParameterError, OverloadedError

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One request that is being served."""

    # The id that the caller knows; another tenant may use the same one meanwhile.
    request_id: RequestId
    # The id in the engine, never used twice: a caller may use its id again as soon as it has its answer.
    engine_id: RequestId
    # Set by AbortRequest; matters while the request has not reached the engine.
    is_aborted: bool = False


class LiveRequests:
    """The ids in use, at most `max_requests` of them: overload is refused before any work is done for a request."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        # By tenant and id: what one tenant serves is nobody else's to see, to hinder or to end.
        self._requests: dict[tuple[str, str], LiveRequest] = {}
        self._num_claimed = itertools.count()

    @contextmanager
    def claimed(self, offered_id: str, tenant: str) -> Iterator[LiveRequest]:
        """Takes the caller's id, or a new one where it is empty, for the duration of the block.

        Raises InvalidParameterError for an id that is malformed or in use by the tenant, OverloadedError when there are
        too many.
        """
        if offered_id and not _REQUEST_ID.fullmatch(offered_id):
            raise InvalidParameterError("request_id", "must be 1 to 128 characters of [A-Za-z0-9._:-]")
        request_id = offered_id or uuid.uuid4().hex
        key = tenant, request_id
        if key in self._requests:
            raise InvalidParameterError("request_id", "a request with this id is being served; choose another")
        if len(self._requests) >= self._max_requests:
            raise OverloadedError(f"{len(self._requests)} requests are being served, the limit; come back later")
        live = self._requests[key] = LiveRequest(
            RequestId(request_id), RequestId(f"{request_id}#{next(self._num_claimed)}")
        )
        try:
            yield live
        finally:
            del self._requests[key]

    def abort(self, request_id: str, tenant: str | None) -> list[LiveRequest]:
        """Marks the tenant's request as aborted and returns it; of None, every tenant's. Empty for an unknown id."""
        if tenant is None:
            found = [live for live in self._requests.values() if live.request_id == request_id]
        else:
            found = [live for live in (self._requests.get((tenant, request_id)),) if live is not None]
        for live in found:
            live.is_aborted = True
        return found
