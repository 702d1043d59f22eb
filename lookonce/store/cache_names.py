"""The names of all keys and channels in Redis.

    lookonce:<encoder fingerprint>:<tenant tag>:{<key>}:e    header and rows of one image
                                                      :m    its metadata, which outlives the rows
                                                      :l    its encode lease (encode_lease.py)
                                                      :r    written when an operator revokes the lease
                                                      :d    channel: the end of an encode
    lookonce:forget                                         channel: images to forget (forget_channel.py)
    lookonce:forgets                                        token of the last such message

The braces put all keys of an image into one cluster slot. The prefix lets one scan find all images of an encoder or of
a tenant. The tenant tag does not reveal the tenant.
"""

from __future__ import annotations

from lookonce.content_key import ContentKey, Tenant

FORGET_CHANNEL = b"lookonce:forget"
FORGET_TOKEN = b"lookonce:forgets"
DATA_SUFFIX = b":e"
METADATA_SUFFIX = b":m"


def data_key(key: ContentKey) -> bytes:
    """Returns the key of an image's header and rows."""
    return _name(key, "e")


def metadata_key(key: ContentKey) -> bytes:
    """Returns the key of an image's metadata, which is its shape."""
    return _name(key, "m")


def lease_key(key: ContentKey) -> bytes:
    """Returns the key of an image's encode lease."""
    return _name(key, "l")


def revocation_key(key: ContentKey) -> bytes:
    """Returns the key that changes when an operator revokes the encode lease of an image."""
    return _name(key, "r")


def revocation_of(lease: bytes) -> bytes:
    """Returns the `revocation_key` of the image whose `lease_key` is given."""
    return tag_of_name(lease) + b":r"


def done_channel(key: ContentKey) -> bytes:
    """Returns the channel on which the end of an encode is announced."""
    return _name(key, "d")


def pattern_of_fingerprint(fingerprint: str) -> bytes:
    """Returns a SCAN pattern for all keys of one encoder."""
    return f"lookonce:{fingerprint}:*".encode()


def pattern_of_tenant(tenant: Tenant) -> bytes:
    """Returns a SCAN pattern for all keys of one tenant, of any encoder."""
    return f"lookonce:*:{tenant.tag}:*".encode()


def leases_in(pattern: bytes) -> bytes:
    """Returns a SCAN pattern for the encode leases among the keys of `pattern`, which is one of the patterns above."""
    return pattern + b":l"


def tag_of_name(name: bytes) -> bytes:
    """Returns the name without its kind, which all keys of one image share."""
    return name.rpartition(b":")[0]


def _name(key: ContentKey, kind: str) -> bytes:
    return f"lookonce:{key.fingerprint}:{key.tenant_tag}:{{{key.hex}}}:{kind}".encode()
