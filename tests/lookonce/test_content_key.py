"""A key changes exactly with the inputs that change the rows, and a tenant's key depends on its secret."""

from __future__ import annotations

import hashlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookonce import content_key as module
from lookonce.content_key import (
    DEFAULT_TENANT,
    ContentKey,
    EncoderFingerprint,
    ImageDigest,
    ProcessorOptions,
    Tenant,
    content_key,
    encoder_fingerprint,
    image_digest,
    pair_digest,
    parse_digest,
)
from lookonce.errors import InvalidParameterError
from lookonce.image_file import FramePair, file_digest, files_of
from lookonce.store.cache_names import data_key, lease_key, metadata_key, pattern_of_fingerprint, pattern_of_tenant

DIGEST = image_digest(b"picture")
NO_OPTIONS = ProcessorOptions()
FINGERPRINT = EncoderFingerprint("f" * 64)


def key(
    digest: ImageDigest = DIGEST,
    fingerprint: EncoderFingerprint = FINGERPRINT,
    options: ProcessorOptions = NO_OPTIONS,
    tenant: Tenant = DEFAULT_TENANT,
) -> ContentKey:
    return content_key(digest, fingerprint, options, tenant)


def test_each_ingredient_changes_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [
        key(),
        key(digest=image_digest(b"another picture")),
        key(fingerprint=EncoderFingerprint("e" * 64)),
        key(options=ProcessorOptions(max_pixels=5000)),
        key(options=ProcessorOptions(max_pixels=0)),
        key(options=ProcessorOptions(beside_others=True)),
        key(options=ProcessorOptions(frame_size=(56, 28))),
        key(options=ProcessorOptions(frame_size=(28, 56))),
        key(tenant=Tenant("other", DEFAULT_TENANT.secret)),
        key(tenant=Tenant(DEFAULT_TENANT.name, b"another secret")),
    ]
    monkeypatch.setattr(module, "EMBEDDING_SCHEMA", module.EMBEDDING_SCHEMA + 1)
    values.append(key())
    assert len({one.value for one in values}) == len(values)
    assert all(len(one.value) == 32 for one in values)


def test_a_pair_of_frames_is_named_by_both_files_and_their_order() -> None:
    first, second = image_digest(b"first"), image_digest(b"second")
    pair, turned = FramePair(b"first", b"second"), FramePair(b"second", b"first")
    twice = FramePair(b"first", None)
    digests = [file_digest(one) for one in (pair, turned, twice, b"first", b"firstsecond")]
    assert len(set(digests)) == len(digests)
    # The format that the wire contract defines.
    said = b"".join(len(part).to_bytes(8, "little") + part for part in (b"lookonce/frame-pair/1", first, second))
    assert file_digest(pair) == pair_digest(first, second) == hashlib.sha256(said).digest()
    assert file_digest(twice) == file_digest(FramePair(b"first", b"first"))
    assert (files_of(twice), files_of(b"first"), files_of(pair)) == ((b"first",), (b"first",), (b"first", b"second"))


def test_the_same_ingredients_give_the_same_key() -> None:
    assert key() == key()


def test_each_ingredient_changes_the_fingerprint() -> None:
    tensors = [("a", memoryview(b"12")), ("b", memoryview(b"34"))]
    fingerprints = {
        encoder_fingerprint("llava", tensors, b"{}", "float32"),
        encoder_fingerprint("qwen", tensors, b"{}", "float32"),
        encoder_fingerprint("llava", [("a", memoryview(b"12")), ("b", memoryview(b"35"))], b"{}", "float32"),
        encoder_fingerprint("llava", [("a", memoryview(b"123")), ("b", memoryview(b"4"))], b"{}", "float32"),
        encoder_fingerprint("llava", [("c", memoryview(b"12")), ("b", memoryview(b"34"))], b"{}", "float32"),
        encoder_fingerprint("llava", tensors, b'{"size": 1}', "float32"),
        encoder_fingerprint("llava", tensors, b"{}", "bfloat16"),
    }
    assert len(fingerprints) == 7


@given(st.lists(st.tuples(st.text(max_size=4), st.binary(max_size=4)), max_size=4, unique=True))
def test_no_two_tenants_share_a_key_or_a_tag(tenants: list[tuple[str, bytes]]) -> None:
    for one, other in itertools.combinations([Tenant(name, secret) for name, secret in tenants], 2):
        if one.secret.rstrip(b"\0") != other.secret.rstrip(b"\0") or one.name != other.name:
            assert key(tenant=one).value != key(tenant=other).value
            assert one.tag != other.tag


def test_names_show_neither_digest_nor_tenant_nor_secret() -> None:
    tenant = Tenant("acme", b"a secret")
    for name in (data_key(key(tenant=tenant)), metadata_key(key(tenant=tenant)), lease_key(key(tenant=tenant))):
        for hidden in (DIGEST.hex().encode(), b"acme", tenant.secret, hashlib.sha256(b"acme").hexdigest().encode()):
            assert hidden not in name
    assert "a secret" not in repr(tenant)


def test_all_names_of_an_image_are_in_one_slot_and_under_its_encoder_and_tenant() -> None:
    tenant = Tenant("acme", b"a secret")
    one = key(tenant=tenant)
    for name in (data_key(one), metadata_key(one), lease_key(one)):
        assert name[name.index(b"{") + 1 : name.index(b"}")] == one.hex.encode()
        assert name.startswith(pattern_of_fingerprint(FINGERPRINT).removesuffix(b"*"))
        before, after = pattern_of_tenant(tenant).strip(b"*").split(b"*")
        assert name.startswith(before)
        assert after in name


@pytest.mark.parametrize("length", [0, 31, 33, 64])
def test_a_digest_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(InvalidParameterError, match=str(length)):
        parse_digest(bytes(length), "key")
