"""Tenants and the secret under which their keys are made; the same in all services."""

from __future__ import annotations

import hmac
import pathlib

from lookonce.content_key import DEFAULT_TENANT, Tenant
from lookonce.errors import ConfigurationError

SECRET_BYTES = 32
_DOMAIN = b"lookonce/tenant-secret/1:"


class Tenants:
    """All tenants of a deployment."""

    def __init__(self, secret: bytes | None) -> None:
        """`secret` None: a public one, which keeps tenants apart and tells who knows a digest what is cached."""
        self._secret = secret
        # Whom requests belong to that say nothing else.
        self.default = self.named("")

    def named(self, name: str) -> Tenant:
        """The tenant of this name; the default one for an empty name."""
        name = name or DEFAULT_TENANT.name
        if self._secret is None:
            return Tenant(name, DEFAULT_TENANT.secret)
        return Tenant(name, hmac.digest(self._secret, _DOMAIN + name.encode(), "sha256"))


def load_tenants(secret_file: pathlib.Path | None) -> Tenants:
    """Tenants under the secret of a file with 64 hex characters. Raises ConfigurationError for any other file."""
    if secret_file is None:
        return Tenants(None)
    try:
        secret = bytes.fromhex(secret_file.read_text("ascii").strip())
    except (OSError, ValueError) as error:
        raise _unusable(secret_file, type(error).__name__) from None
    if len(secret) != SECRET_BYTES:
        raise _unusable(secret_file, f"{len(secret)} bytes")
    return Tenants(secret)


def _unusable(path: pathlib.Path, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"tenant_secret_file: {path} must be readable and hold {2 * SECRET_BYTES} hex characters ({why})"
    )
