"""All names in Redis.

    lookonce:<encoder fingerprint>:<tenant tag>:{<key>}:e    header and rows of one image
                                                      :m    its description, which outlives the rows
                                                      :l    who encodes it now (encode_lease.py)
                                                      :d    channel: the end of an encode
    lookonce:forget                                         channel: images to forget (forget_channel.py)
    lookonce:forgets                                        token of the last such message

The braces put all of one image into one cluster slot. What is before them lets one scan find everything of an encoder
or of a tenant; the tag tells nobody which tenant that is.
"""

from __future__ import annotations

from lookonce.content_key import ContentKey, Tenant

FORGET_CHANNEL = b"lookonce:forget"
FORGET_TOKEN = b"lookonce:forgets"


def data_key(key: ContentKey) -> bytes:
    """Header and rows."""
    return _name(key, "e")


def metadata_key(key: ContentKey) -> bytes:
    """Shape only."""
    return _name(key, "m")


def lease_key(key: ContentKey) -> bytes:
    """Who encodes the image."""
    return _name(key, "l")


def done_channel(key: ContentKey) -> bytes:
    """Where the end of an encode is told."""
    return _name(key, "d")


def pattern_of_fingerprint(fingerprint: str) -> bytes:
    """Matches everything of one encoder."""
    return f"lookonce:{fingerprint}:*".encode()


def pattern_of_tenant(tenant: Tenant) -> bytes:
    """Matches everything of one tenant, of whichever encoder."""
    return f"lookonce:*:{tenant.tag}:*".encode()


def _name(key: ContentKey, kind: str) -> bytes:
    return f"lookonce:{key.fingerprint}:{key.tenant_tag}:{{{key.hex}}}:{kind}".encode()
