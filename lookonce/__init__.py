"""Lookonce: an image is looked at once.

The clients are loaded on first use, so that importing a module of this package does not import gRPC.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["AdminClient", "AsyncAdminClient", "AsyncClient", "Client", "__version__"]

__version__ = "0.1.0"

if TYPE_CHECKING:
    from lookonce.admin.aio import AsyncAdminClient
    from lookonce.admin.client import AdminClient
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
        if name == "AdminClient":
            from lookonce.admin.client import AdminClient

            return AdminClient
        if name == "AsyncAdminClient":
            from lookonce.admin.aio import AsyncAdminClient

            return AsyncAdminClient
        raise AttributeError(f"module 'lookonce' has no attribute {name!r}")
