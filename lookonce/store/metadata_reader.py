"""Reads the metadata of images over one exchange: of one image, or of several whose commands are sent together."""

from __future__ import annotations

from collections.abc import Sequence

from lookonce.content_key import ContentKey
from lookonce.embedding_meta import EmbeddingMeta
from lookonce.store.cache_names import metadata_key
from lookonce.store.codec import EmbeddingCodec
from lookonce.store.redis.exchange import Exchange
from lookonce.store.redis.miss_reason import CacheMissError, MissReason, RedisReplyError, RedisTroubleError


def read_metadata(exchange: Exchange, codec: EmbeddingCodec, key: ContentKey) -> EmbeddingMeta:
    """Returns the verified shape of an image. Raises CacheMissError."""
    exchange.send(*_command(codec, key))
    return _receive(exchange, codec, key)


def read_all_metadata(
    exchange: Exchange, codec: EmbeddingCodec, keys: Sequence[ContentKey]
) -> list[EmbeddingMeta | MissReason]:
    """Returns for each key the verified shape of its image, or the reason of a miss that concerns this key alone.

    One round trip. Raises RedisTroubleError if the server does not answer all commands.
    """
    exchange.send_together(*(_command(codec, key) for key in keys))
    return [_received_or_reason(exchange, codec, key) for key in keys]


def _command(codec: EmbeddingCodec, key: ContentKey) -> tuple[bytes | int, ...]:
    # One byte more than expected reveals a longer value without reading all of it.
    return (b"GETRANGE", metadata_key(key), 0, codec.metadata_bytes)


def _receive(exchange: Exchange, codec: EmbeddingCodec, key: ContentKey) -> EmbeddingMeta:
    data = memoryview(bytearray(codec.metadata_bytes + 1))
    num_bytes = exchange.read_bulk_into(data)
    if num_bytes == 0:
        raise CacheMissError(MissReason.ABSENT)
    return codec.parse_metadata(data[:num_bytes], key.value)


def _received_or_reason(exchange: Exchange, codec: EmbeddingCodec, key: ContentKey) -> EmbeddingMeta | MissReason:
    try:
        return _receive(exchange, codec, key)
    except CacheMissError as miss:
        # After an error reply the next replies follow as usual, and after any other trouble none does.
        if isinstance(miss, RedisTroubleError) and not isinstance(miss, RedisReplyError):
            raise
        return miss.reason
