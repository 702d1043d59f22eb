"""The identity of a caller, and the form of a request's id.

The server's call gate sets the identity for each call; code that acts for the caller reads it.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

TENANT_NAME = re.compile(r"[A-Za-z0-9._-]{0,64}")
"""Pattern of a tenant's name; the empty name is the default tenant."""

REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
"""Pattern of a request's id, in the request as in the metadata of its call."""
REQUEST_ID_RULE = "must be 1 to 128 characters of [A-Za-z0-9._:-]"
"""The same for people, to follow the field's name in an error."""
REQUEST_ID_KEY = "x-request-id"
AFFINITY_KEY = "x-lookonce-affinity"
"""Name of the metadata by which proxies send equal contents to one decoder; see sdk/routing/affinity.py."""
"""Key of the id in the metadata of a call, and in those behind its answer."""


class CallerRole(enum.Enum):
    """The calls that an identity may make."""

    # Calls of its own tenant.
    CLIENT = "client"
    # Calls for any tenant that it names. Decoders have it to ask encoders. No quota: the decoder has checked it.
    SERVICE = "service"
    # All calls, including those of the admin service.
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class Identity:
    """Name, tenant and role of a caller."""

    # Shown in audit lines, never in a metric.
    name: str
    # The tenant whose images and answers it may use; empty: the default tenant.
    tenant: str
    role: CallerRole
    # False if the server asks for no token. The tenant then is one that the caller has chosen and may change at will.
    is_authenticated: bool = True


TENANT_KEY = "x-lookonce-tenant"
"""Metadata key with which a caller of role service or operator names the tenant it calls for."""

# The identity of every caller of a server without authentication, which restricts nobody. A caller may name a tenant.
ANYBODY = Identity("anybody", "", CallerRole.OPERATOR, is_authenticated=False)

_current: ContextVar[Identity] = ContextVar("lookonce_identity", default=ANYBODY)


def current_identity() -> Identity:
    """Returns the identity of the call that this task serves."""
    return _current.get()


@contextmanager
def acting_for(identity: Identity) -> Iterator[None]:
    """Makes `identity` the current one inside the block and in tasks that start there."""
    token = _current.set(identity)
    try:
        yield
    finally:
        _current.reset(token)
