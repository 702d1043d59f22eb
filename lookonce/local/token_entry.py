"""A new bearer token and the entry by which services know it (authentication.py)."""

from __future__ import annotations

import hashlib
import json
import secrets

from lookonce.errors import ConfigurationError

# 256 random bits: nobody guesses one, so one round of SHA-256 keeps them.
_TOKEN_BYTES = 32


def new_token(name: str, tenant: str, role: str) -> tuple[str, str]:
    """(token, TOML entry). Raises ConfigurationError for a name, tenant or role that services would refuse."""
    from lookonce.server.authentication import parse_tokens

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
