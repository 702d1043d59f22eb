"""Hashes of KV blocks, by which requests with equal prefixes find each other's blocks.

A block's hash covers its parent's hash, its token ids and everything else that its keys and values depend on: the
adapter, the images that overlap it, the salt (first block only), and the whole prompt if its attention is fully
bidirectional (first block only).

An image enters with the distance from the block's start to the image's start, which is negative if the image began in
an earlier block. Placeholder tokens are all alike, so without the distance two different blocks could get one hash. A
pair of video frames also enters with its time if its positions depend on it. Hashes are full SHA-256 digests.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence

from decoder_svc.scheduling.prompt import ImageItem, Prompt
from decoder_svc.scheduling.request import BlockHash, Request
from lookonce.families.base import Mask

# Raise the number whenever the encoding below changes.
_ROOT_DOMAIN = b"lookonce/kv-block/3"
_ADAPTER, _IMAGE, _SALT, _PROMPT, _FRAMES = b"\x01", b"\x02", b"\x03", b"\x04", b"\x05"


class BlockHasher:
    """Computes block hashes for one model and stores them in the requests."""

    def __init__(self, block_size: int, deployment: bytes = b"") -> None:
        """`deployment` covers everything that must be equal for sharing blocks: model, dtype and seed."""
        self.block_size = block_size
        # Number of blocks hashed so far, over all requests.
        self.num_hashed = 0
        self._root = hashlib.sha256(_framed([_ROOT_DOMAIN, block_size.to_bytes(8, "little"), deployment])).digest()

    def extend(self, request: Request) -> None:
        """Appends the hashes of the request's blocks of known tokens that have none yet.

        Cheap if there are no such blocks.
        """
        hashes = request.block_hashes
        num_full = len(request.token_ids) // self.block_size
        if len(hashes) == num_full:
            return
        parent = hashes[-1] if hashes else self._root
        for index in range(len(hashes), num_full):
            parent = self._hash(parent, request, index)
            hashes.append(BlockHash(parent))
            self.num_hashed += 1

    def _hash(self, parent: bytes, request: Request, index: int) -> bytes:
        start = index * self.block_size
        stop = start + self.block_size
        digest = hashlib.sha256(parent)
        # Every block has the same number of ids, so the ids need no length prefix.
        digest.update(_token_bytes(request.token_ids[start:stop]))
        digest.update(_extra_keys(request, start, stop))
        return digest.digest()


def _token_bytes(token_ids: Sequence[int]) -> bytes:
    """Encodes ids as eight bytes each, little-endian on every machine."""
    ids = array("q", token_ids)
    if _IS_BIG_ENDIAN:
        ids.byteswap()
    return ids.tobytes()


_IS_BIG_ENDIAN = array("H", [1]).tobytes() == b"\x00\x01"


def _extra_keys(request: Request, start: int, stop: int) -> bytes:
    fields: list[bytes] = []
    if request.cache_scope.adapter:
        fields.append(_ADAPTER + request.cache_scope.adapter.encode())
    fields += [_item_field(item, start) for item in _images_between(request, start, stop)]
    if start == 0 and request.cache_scope.salt:
        fields.append(_SALT + request.cache_scope.salt)
    if start == 0 and request.prompt.mask is Mask.PROMPT:
        fields.append(_PROMPT + _prompt_digest(request.prompt))
    return _framed(fields) if fields else b""


def _item_field(item: ImageItem, start: int) -> bytes:
    place = (item.span.offset - start).to_bytes(8, "little", signed=True)
    if item.time is None:
        return _IMAGE + place + item.key.value
    # The same frames at another time in a video have other positions, and so have markers behind a prompt's last image
    # in an answer.
    return _FRAMES + item.time.to_bytes(8, "little") + place + item.key.value


def _prompt_digest(prompt: Prompt) -> bytes:
    """Hashes a prompt with fully bidirectional attention: its blocks depend on all tokens and images."""
    images = (item.span.offset.to_bytes(8, "little") + item.key.value for item in prompt.images)
    return hashlib.sha256(_framed([_token_bytes(prompt.token_ids), *images])).digest()


def _images_between(request: Request, start: int, stop: int) -> Iterable[ImageItem]:
    """Yields the images whose spans overlap tokens [start, stop), in prompt order."""
    images = request.prompt.images
    # A prompt may have hundreds of images and thousands of blocks: skip the images that ended before `start`.
    for index in range(bisect_right(images, start, key=_span_stop), len(images)):
        if images[index].span.offset >= stop:
            return
        yield images[index]


def _span_stop(item: ImageItem) -> int:
    return item.span.stop


def _framed(fields: Iterable[bytes]) -> bytes:
    """Joins fields with length prefixes, so that different lists of fields give different bytes."""
    return b"".join(len(field).to_bytes(8, "little") + field for field in fields)
