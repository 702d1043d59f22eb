"""Checks the settings of the shared cache before a service loads its model, which may take minutes."""

from __future__ import annotations

import pathlib

from pydantic import SecretStr

from lookonce.store.redis.deployment import open_deployment
from lookonce.store.sealing import load_sealer

# Only connections would use it, and none is opened.
_BUDGET_S = 1.0


def check_cache_settings(redis_url: SecretStr | None, seal_key_file: pathlib.Path | None) -> None:
    """Raises ConfigurationError for a URL or a file of keys that no store can use. Connects to no server."""
    load_sealer(seal_key_file)
    if redis_url is not None:
        open_deployment(redis_url.get_secret_value(), _BUDGET_S).close()
