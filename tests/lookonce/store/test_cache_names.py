"""Names in Redis keep an image in one cluster slot and let a pattern find an encoder's or a tenant's images."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase

import pytest
from redis.crc import key_slot

from lookonce.content_key import ContentKey, EncoderFingerprint, ProcessorOptions, Tenant, content_key, image_digest
from lookonce.store.cache_names import (
    FORGET_TOKEN,
    data_key,
    done_channel,
    lease_key,
    metadata_key,
    pattern_of_fingerprint,
    pattern_of_tenant,
)

NAMES: list[Callable[[ContentKey], bytes]] = [data_key, metadata_key, lease_key, done_channel]
ENCODER, OTHER_ENCODER = EncoderFingerprint("a" * 64), EncoderFingerprint("b" * 64)
ACME, OTHER_TENANT = Tenant("acme", b"secret of acme"), Tenant("other", b"secret of the other")


def key_of(fingerprint: EncoderFingerprint, tenant: Tenant, image: bytes = b"image") -> ContentKey:
    return content_key(image_digest(image), fingerprint, ProcessorOptions(), tenant)


def matches(pattern: bytes, name: bytes) -> bool:
    return fnmatchcase(name.decode(), pattern.decode())


def test_all_names_of_an_image_are_distinct_and_in_one_slot() -> None:
    names = [name(key_of(ENCODER, ACME)) for name in NAMES]
    assert len(set(names)) == len(NAMES)
    assert len({key_slot(name) for name in names}) == 1


def test_images_spread_over_slots() -> None:
    keys = [key_of(ENCODER, ACME, b"%d" % number) for number in range(200)]
    assert len({key_slot(data_key(key)) for key in keys}) > 150


@pytest.mark.parametrize("name", NAMES)
def test_patterns_find_all_names_of_an_encoder_or_tenant_and_no_others(name: Callable[[ContentKey], bytes]) -> None:
    for fingerprint in (ENCODER, OTHER_ENCODER):
        for tenant in (ACME, OTHER_TENANT):
            found = name(key_of(fingerprint, tenant))
            assert matches(pattern_of_fingerprint(ENCODER), found) is (fingerprint == ENCODER)
            assert matches(pattern_of_tenant(ACME), found) is (tenant == ACME)


def test_no_pattern_finds_the_forget_token() -> None:
    for pattern in (pattern_of_fingerprint(ENCODER), pattern_of_tenant(ACME)):
        assert not matches(pattern, FORGET_TOKEN)


def test_names_do_not_reveal_the_tenant() -> None:
    assert b"acme" not in data_key(key_of(ENCODER, ACME))
