"""Lookonce: an image is looked at once.

`lookonce.Client` and `lookonce.AsyncClient` are loaded on first use, so that importing a module of this package does
not import gRPC.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["AsyncClient", "Client", "__version__"]

__version__ = "0.1.0"

if TYPE_CHECKING:
    from lookonce.aio import AsyncClient
    from lookonce.client import Client
else:
    # Hidden from type checkers, for which any name would exist.
    def __getattr__(name: str) -> object:
        if name == "Client":
            from lookonce.client import Client

            return Client
        if name == "AsyncClient":
            from lookonce.aio import AsyncClient

            return AsyncClient
        raise AttributeError(f"module 'lookonce' has no attribute {name!r}")
