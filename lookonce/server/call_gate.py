"""Authenticates and authorizes calls: identity by token, role, tenant, quota. One gate for each server address."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import structlog

from lookonce.errors import InvalidParameterError, PermissionDeniedError, UnauthenticatedError
from lookonce.identity import ANYBODY, TENANT_KEY, TENANT_NAME, CallerRole, Identity, acting_for
from lookonce.server.authentication import Authenticator
from lookonce.server.quotas import Quotas

_AUTHORIZATION_KEY = "authorization"
_SCHEME = "bearer "

_audit: structlog.stdlib.BoundLogger = structlog.get_logger("lookonce.audit")


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

        Raises UnauthenticatedError, PermissionDeniedError, InvalidParameterError for a malformed tenant name, and
        OverloadedError beyond the tenant's quota.
        """
        if method.strip("/").partition("/")[0] in self._open_services:
            with acting_for(ANYBODY):
                yield
            return
        identity = self._identity(method, {key: value for key, value in metadata if isinstance(value, str)})
        with acting_for(identity), self._quotas.admitted(identity):
            yield

    def _identity(self, method: str, metadata: Mapping[str, str]) -> Identity:
        try:
            identity = self._authenticator.identify(_token(metadata.get(_AUTHORIZATION_KEY)))
        except UnauthenticatedError:
            _audit.warning("call refused", method=method, reason="unauthenticated")
            raise
        if self._role is not None and identity.role is not self._role:
            _audit.warning("call refused", method=method, reason="role", identity=identity.name)
            raise PermissionDeniedError(f"only a token of role {self._role.value} may make this call")
        tenant = metadata.get(TENANT_KEY)
        if tenant is None or identity.role is CallerRole.CLIENT:
            return identity
        if not TENANT_NAME.fullmatch(tenant):
            raise InvalidParameterError(TENANT_KEY, f"must match {TENANT_NAME.pattern}")
        return replace(identity, tenant=tenant)


def _token(authorization: str | None) -> str | None:
    """Returns the token of an authorization header, or None. The scheme is not case-sensitive."""
    if authorization is None or authorization[: len(_SCHEME)].lower() != _SCHEME:
        return None
    return authorization[len(_SCHEME) :].strip()
