"""The search of one request for a replica: the one for its content, among those that have its adapter."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import grpc

from lookonce.errors import InvalidParameterError, UnavailableError
from lookonce.sdk.routing.adapter_map import AdapterMap
from lookonce.sdk.routing.place import Place, is_unsent
from lookonce.status_codes import from_rpc_error


class Candidates(Protocol):
    """The replicas among which a request searches."""

    adapters: AdapterMap

    def place(self, affinity: bytes, adapter: str = "", tried: Collection[str] = ()) -> Place | None:
        """Returns a place at a replica that serves and was not tried; None: there is none."""
        ...

    def may_be_away(self, adapter: str, refused: Collection[str]) -> bool:
        """Whether a replica that cannot be reached at the moment may have an adapter, beside those that refused it."""
        ...


class Search:
    """The replicas that one request tries, one after the other. Each is tried once."""

    def __init__(self, candidates: Candidates, affinity: bytes, adapter: str) -> None:
        """`adapter` is empty for the base model, which every replica has."""
        self._candidates = candidates
        self._affinity = affinity
        self._adapter = adapter
        self._tried: set[str] = set()
        self._refused: set[str] = set()

    def first(self) -> Place | None:
        """Returns the first place; None: the request goes to any replica."""
        return self._candidates.place(self._affinity, self._adapter)

    def answered(self, place: Place | None) -> None:
        """Notes that the replica at a place has taken the request."""
        if self._adapter and place is not None:
            self._candidates.adapters.note_served(place.address, self._adapter)

    def after(self, place: Place | None, error: BaseException) -> Place | None:
        """Returns the next place for a request that failed; None: there is no other.

        `place` None: it failed at a replica that gRPC chose.

        Raises UnavailableError if the replicas that can be reached do not have the adapter, and one that cannot be
        reached may have it.
        """
        if place is not None:
            place.failed(error)
        if not self._adapter:
            return None
        is_refusal = _refuses_adapter(error)
        if not is_refusal and not is_unsent(error):
            return None
        if place is not None:
            self._tried.add(place.address)
            if is_refusal:
                self._refused.add(place.address)
                self._candidates.adapters.note_refused(place.address, self._adapter)
        following = self._candidates.place(self._affinity, self._adapter, self._tried)
        if following is None and is_refusal and self._candidates.may_be_away(self._adapter, self._refused):
            raise UnavailableError(
                f"no replica that can be reached serves the adapter {self._adapter[:64]!r}, and others may; try again"
            )
        return following

    def may_go_anywhere(self, place: Place | None, error: BaseException) -> bool:
        """Whether a request without a next place may go to any replica, as gRPC chooses: it was not sent yet."""
        return place is not None and is_unsent(error) and not self._refused


def _refuses_adapter(error: BaseException) -> bool:
    if not isinstance(error, grpc.RpcError) or error.code() is not grpc.StatusCode.INVALID_ARGUMENT:
        return False
    typed = from_rpc_error(error)
    return isinstance(typed, InvalidParameterError) and typed.field == "adapter"
