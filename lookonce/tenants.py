"""The tenants of a deployment, and the secret from which their keys are derived. All services share the secret."""

from __future__ import annotations

import hmac
import pathlib

from lookonce.content_key import DEFAULT_TENANT, Tenant
from lookonce.errors import ConfigurationError

SECRET_BYTES = 32
_DOMAIN = b"lookonce/tenant-secret/1:"


class Tenants:
    """Derives the key of each tenant from one secret."""

    def __init__(self, secret: bytes | None) -> None:
        """`secret` None uses a public one: tenants stay apart, but whoever knows a digest can learn if it is cached."""
        self._secret = secret
        # The owner of requests that name no tenant.
        self.default = self.named("")

    def named(self, name: str) -> Tenant:
        """Returns the tenant with this name; the default tenant for an empty name."""
        name = name or DEFAULT_TENANT.name
        if self._secret is None:
            return Tenant(name, DEFAULT_TENANT.secret)
        return Tenant(name, hmac.digest(self._secret, _DOMAIN + name.encode(), "sha256"))


def load_tenants(secret_file: pathlib.Path | None) -> Tenants:
    """Reads the secret, 64 hex characters, from a file. Raises ConfigurationError for any other content."""
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
