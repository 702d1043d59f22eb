"""Authenticates and authorizes calls: identity by token, role, tenant, quota. One gate for each server address."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from lookonce.errors import InvalidParameterError, PermissionDeniedError, UnauthenticatedError
from lookonce.identity import ANYBODY, TENANT_KEY, TENANT_NAME, CallerRole, Identity, acting_for
from lookonce.logs import get_logger
from lookonce.server.admission.authentication import Authenticator
from lookonce.server.admission.quotas import Quotas

_AUTHORIZATION_KEY = "authorization"
_SCHEME = "bearer "

_audit = get_logger("lookonce.audit")


class CallGate:
    """The first check of every call, before its message is parsed."""

    def __init__(
        self,
        authenticator: Authenticator,
        quotas: Quotas,
        *,
        open_services: frozenset[str],
        role: CallerRole | None = None,
    ) -> None:
        """Calls of `open_services` (health) need no token. Callers must have `role`; None: any role."""
        self._authenticator = authenticator
        self._quotas = quotas
        self._open_services = open_services
        self._role = role

    @contextmanager
    def passed(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> Iterator[None]:
        """Admits a call of `method` ("/package.Service/Method") and makes its caller the current identity in the block.

        Raises UnauthenticatedError, also for several authorization headers; PermissionDeniedError;
        InvalidParameterError for a malformed tenant name or several; and OverloadedError beyond the tenant's quota.
        """
        if method.strip("/").partition("/")[0] in self._open_services:
            with acting_for(ANYBODY):
                yield
            return
        identity = self._identity(method, tuple(metadata))
        with acting_for(identity), self._quotas.admitted(identity):
            yield

    def _identity(self, method: str, metadata: Sequence[tuple[str, str | bytes]]) -> Identity:
        try:
            identity = self._authenticator.identify(_token(values_of(metadata, _AUTHORIZATION_KEY)))
        except UnauthenticatedError:
            _audit.warning("call refused", method=method, reason="unauthenticated")
            raise
        if self._role is not None and identity.role is not self._role:
            _audit.warning("call refused", method=method, reason="role", identity=identity.name)
            raise PermissionDeniedError(f"only a token of role {self._role.value} may make this call")
        tenants = values_of(metadata, TENANT_KEY)
        if not tenants or identity.role is CallerRole.CLIENT:
            return identity
        if len(tenants) > 1:
            raise InvalidParameterError(TENANT_KEY, f"was sent {len(tenants)} times in one call; send it once")
        (tenant,) = tenants
        if not TENANT_NAME.fullmatch(tenant):
            raise InvalidParameterError(TENANT_KEY, f"must match {TENANT_NAME.pattern}")
        return replace(identity, tenant=tenant)


def values_of(metadata: Iterable[tuple[str, str | bytes]], key: str) -> list[str]:
    """Returns all texts that a call's metadata have under `key`. gRPC passes on a header that was sent twice twice."""
    return [value for name, value in metadata if name == key and isinstance(value, str)]


def _token(authorizations: Sequence[str]) -> str | None:
    """Returns the token of the authorization header, or None. The scheme is not case-sensitive.

    Raises UnauthenticatedError for several headers: two programs that each take another one would disagree on the
    caller.
    """
    if len(authorizations) > 1:
        raise UnauthenticatedError(
            f"the call has {len(authorizations)} authorization headers; send one, authorization: Bearer …"
        )
    for authorization in authorizations:
        if authorization[: len(_SCHEME)].lower() == _SCHEME:
            return authorization[len(_SCHEME) :].strip()
    return None
