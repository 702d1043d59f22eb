"""The identity of an embedding. Digests, encoder fingerprints and cache keys are computed only here.

    key = SHA-256( schema ‖ HMAC-SHA-256(tenant secret, image digest) ‖ encoder fingerprint ‖ processor options )

Two requests share an embedding exactly if their keys are equal. No digest is truncated, and Python's `hash()` is not
used. A client may refer to an image by its digest; the server derives the key.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NewType

from lookonce.errors import InvalidParameterError

ImageDigest = NewType("ImageDigest", bytes)
"""SHA-256 of the image file's original bytes, 32 bytes; for a pair of video frames the result of `pair_digest`."""

EncoderFingerprint = NewType("EncoderFingerprint", str)
"""64 hex characters that identify an encoder: its weights, image processor and element types."""

DIGEST_BYTES = 32
# Part of every fingerprint and key. Increase it whenever the meaning of stored rows changes.
EMBEDDING_SCHEMA = 1
_TENANT_DOMAIN = b"lookonce/tenant-tag/1"
_FILE_DOMAIN = b"lookonce/file-tag/1"
_BESIDE_OTHERS = b"beside others"
_FRAME_SIZE = b"frame size"
_PAIR_DOMAIN = b"lookonce/frame-pair/1"
_KEY_DOMAIN = b"lookonce/content-key/1"
_FINGERPRINT_DOMAIN = b"lookonce/encoder-fingerprint/1"


@dataclass(frozen=True, slots=True)
class ProcessorOptions:
    """Per-request options of the image processor that change the rows."""

    # Largest number of pixels after resizing; None: the model's default.
    max_pixels: int | None = None
    # The prompt shows other images, too. Set only for models whose image processor treats such images differently.
    beside_others: bool = False
    # Width and height to which a pair of video frames is resized; None for an image.
    frame_size: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Tenant:
    """The owner of a key, taken only from the authenticated identity."""

    name: str
    # HMAC key. Without it nobody can compute the tenant's cache keys from a digest.
    secret: bytes = field(repr=False)

    @property
    def tag(self) -> str:
        """A pseudonym of the tenant, 64 hex characters; only a holder of the secret can compute it."""
        return hmac.new(self.secret, _framed([_TENANT_DOMAIN, self.name.encode()]), hashlib.sha256).hexdigest()


DEFAULT_TENANT = Tenant("default", b"lookonce/default-tenant")


@dataclass(frozen=True, slots=True)
class ContentKey:
    """The identity of one embedding."""

    # The name of the cache entry and a part of block hashes, 32 bytes.
    value: bytes
    # Digest of the original bytes, which clients know.
    digest: ImageDigest
    # The encoder that makes the rows.
    fingerprint: EncoderFingerprint
    # `Tenant.tag` of the owner.
    tenant_tag: str

    @property
    def hex(self) -> str:
        """The key as 64 hex characters."""
        return self.value.hex()


def image_digest(data: bytes) -> ImageDigest:
    """Returns the SHA-256 of a file's bytes. 0.6 ms per MiB with SHA-NI: keep photos off the event loop."""
    return ImageDigest(hashlib.sha256(data).digest())


def pair_digest(first: ImageDigest, second: ImageDigest) -> ImageDigest:
    """Returns the digest of a pair of video frames, computed from the digests of its files."""
    return ImageDigest(hashlib.sha256(_framed([_PAIR_DOMAIN, first, second])).digest())


def parse_digest(digest: bytes, field: str) -> ImageDigest:
    """Checks the length of a digest that came from outside. Raises InvalidParameterError naming `field`."""
    if len(digest) != DIGEST_BYTES:
        raise InvalidParameterError(field, f"must be a SHA-256 digest of {DIGEST_BYTES} bytes, not {len(digest)} bytes")
    return ImageDigest(digest)


def content_key(
    digest: ImageDigest, fingerprint: EncoderFingerprint, options: ProcessorOptions, tenant: Tenant
) -> ContentKey:
    """Derives the cache key. Changing any argument changes the key."""
    tenant_digest = hmac.new(tenant.secret, _framed([tenant.name.encode(), digest]), hashlib.sha256).digest()
    max_pixels = b"" if options.max_pixels is None else str(options.max_pixels).encode()
    fields = [_KEY_DOMAIN, str(EMBEDDING_SCHEMA).encode(), tenant_digest, fingerprint.encode(), max_pixels]
    if options.beside_others:
        fields.append(_BESIDE_OTHERS)
    if options.frame_size is not None:
        width, height = options.frame_size
        fields += [_FRAME_SIZE, f"{width}x{height}".encode()]
    return ContentKey(hashlib.sha256(_framed(fields)).digest(), digest, fingerprint, tenant.tag)


def file_tag(digest: ImageDigest, tenant: Tenant) -> bytes:
    """Returns the pseudonym of one image file, 32 bytes; only a holder of the tenant's secret can compute it.

    Entries of the shared cache carry the tags of their files, so that all entries of a file can be found, whatever the
    encoder, the options and the other frame are.
    """
    return hmac.new(tenant.secret, _framed([_FILE_DOMAIN, tenant.name.encode(), digest]), hashlib.sha256).digest()


def encoder_fingerprint(
    architecture: str, tensors: Iterable[tuple[str, memoryview]], processor_config: bytes, dtype: str
) -> EncoderFingerprint:
    """Returns a digest over everything that determines an encoder's rows.

    `tensors` yields (name, raw bytes) of the vision tower and the projector in a fixed order. `processor_config` is
    canonical JSON that names the image processor's class and backend. `dtype` is the element type of the forward pass;
    it also names the element type of stored rows if they have another.
    """
    digest = hashlib.sha256(_framed([_FINGERPRINT_DOMAIN, str(EMBEDDING_SCHEMA).encode(), architecture.encode()]))
    digest.update(_framed([dtype.encode(), processor_config]))
    for name, data in tensors:
        digest.update(_framed([name.encode()]))
        digest.update(data.nbytes.to_bytes(8, "little"))
        digest.update(data)
    return EncoderFingerprint(digest.hexdigest())


def _framed(fields: Iterable[bytes]) -> bytes:
    """Concatenates fields with length prefixes, so that no two lists of fields give the same bytes."""
    return b"".join(len(field).to_bytes(8, "little") + field for field in fields)
