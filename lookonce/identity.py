"""Who makes a call. Set once at the border (interceptors.py), read by whoever acts for the caller."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

TENANT_NAME = re.compile(r"[A-Za-z0-9._-]{0,64}")
"""Empty: the default tenant."""


class CallerRole(enum.Enum):
    """What an identity may do."""

    # Calls of its own tenant.
    CLIENT = "client"
    # Calls for whichever tenant it names: decoders, when they ask encoders. No quota, which was asked for already.
    SERVICE = "service"
    # Everything, the operators' calls included.
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class Identity:
    """One caller."""

    # For audit lines; never in a metric.
    name: str
    # Whose images and answers are its own; empty: the default tenant's.
    tenant: str
    role: CallerRole


TENANT_KEY = "x-lookonce-tenant"
"""Metadata by which a caller of role service or operator says for which tenant it calls."""

# Where nobody has to say who they are, nobody is kept from anything.
ANYBODY = Identity("anybody", "", CallerRole.OPERATOR)

_current: ContextVar[Identity] = ContextVar("lookonce_identity", default=ANYBODY)


def current_identity() -> Identity:
    """Of the call that this task serves."""
    return _current.get()


@contextmanager
def acting_for(identity: Identity) -> Iterator[None]:
    """Inside of the block, and in tasks that begin there, this is the current identity."""
    token = _current.set(identity)
    try:
        yield
    finally:
        _current.reset(token)
