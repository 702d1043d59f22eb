"""Makes a bearer token and its entry for the services' tokens file (server/admission/authentication.py)."""

from __future__ import annotations

import hashlib
import json
import secrets

from lookonce.errors import ConfigurationError

# 256 random bits cannot be guessed, so a single SHA-256 protects them; a slow password hash is not needed.
_TOKEN_BYTES = 32


def new_token(name: str, tenant: str, role: str) -> tuple[str, str]:
    """Returns a token and its TOML entry. Raises ConfigurationError for a name, tenant or role that services refuse."""
    from lookonce.server.admission.authentication import parse_tokens

    token = f"lookonce-{secrets.token_urlsafe(_TOKEN_BYTES)}"
    values = {
        "name": name,
        "tenant": tenant,
        "role": role,
        "sha256": hashlib.sha256(token.encode()).hexdigest(),
    }
    entry = "[[tokens]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
    try:
        parse_tokens(entry.encode())
    except ValueError as error:
        raise ConfigurationError(str(error)) from None
    return token, entry
