"""Only tokens that the files know are accepted, and a refusal does not tell the reason."""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import pathlib
import time
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from lookonce.errors import UnauthenticatedError
from lookonce.identity import ANYBODY, CallerRole, Identity
from lookonce.server import watched_files
from lookonce.server.admission.authentication import (
    Authenticator,
    Unguarded,
    load_authenticator,
    parse_keys,
    parse_token,
    parse_tokens,
)
from lookonce.server.settings import ServiceSettings

TOKEN, OTHER = "a-token-of-many-characters", "another-token"
KEY = ec.generate_private_key(ec.SECP256R1())
RSA_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
STRANGERS_KEY = ec.generate_private_key(ec.SECP256R1())
ISSUER, AUDIENCE = "https://id.example", "lookonce"


def entry(token: str, /, **fields: str) -> str:
    values = {"name": "shop", "tenant": "acme", "sha256": hashlib.sha256(token.encode()).hexdigest(), **fields}
    return "[[tokens]]\n" + "\n".join(f"{name} = {json.dumps(value)}" for name, value in values.items()) + "\n"


def key_set(**keys: Any) -> bytes:
    """Returns a JWKS of public keys by id."""
    found = [
        {**json.loads(jwt.algorithms.ECAlgorithm.to_jwk(key.public_key())), "kid": name} for name, key in keys.items()
    ]
    return json.dumps({"keys": found}).encode()


def signed(key: Any = KEY, key_id: str | None = "k1", algorithm: str = "ES256", **changes: Any) -> str:
    claims = {
        "iss": ISSUER,
        "aud": AUDIENCE,
        "sub": "alice",
        "tenant": "acme",
        "exp": int(time.time()) + 600,
        **changes,
    }
    claims = {name: value for name, value in claims.items() if value is not None}
    return jwt.encode(claims, key, algorithm=algorithm, headers={} if key_id is None else {"kid": key_id})


def settings(folder: pathlib.Path, *, tokens: str | None = None, keys: bytes | None = None) -> ServiceSettings:
    values: dict[str, Any] = {"model": folder}
    if tokens is not None:
        (folder / "tokens.toml").write_text(tokens)
        values["auth_tokens_file"] = folder / "tokens.toml"
    if keys is not None:
        (folder / "keys.json").write_bytes(keys)
        values |= {
            "auth_jwt_keys_file": folder / "keys.json",
            "auth_jwt_issuer": ISSUER,
            "auth_jwt_audience": AUDIENCE,
        }
    return ServiceSettings(**values)


def refused(authenticator: Authenticator, token: str | None) -> str:
    with pytest.raises(UnauthenticatedError) as caught:
        authenticator.identify(token)
    return caught.value.message


def test_without_files_every_call_is_accepted(tmp_path: pathlib.Path) -> None:
    authenticator = load_authenticator(settings(tmp_path))
    assert isinstance(authenticator, Unguarded)
    assert authenticator.identify(None) == ANYBODY


def test_a_known_token_has_its_identity_and_all_others_are_refused(tmp_path: pathlib.Path) -> None:
    text = entry(TOKEN) + entry(OTHER, name="ops", tenant="", role="operator")
    authenticator = load_authenticator(settings(tmp_path, tokens=text))
    assert authenticator.identify(TOKEN) == Identity("shop", "acme", CallerRole.CLIENT)
    assert authenticator.identify(OTHER) == Identity("ops", "", CallerRole.OPERATOR)
    wrong = {refused(authenticator, token) for token in ("", TOKEN[:-1], TOKEN + "x", TOKEN.upper(), "\udcff"[:0])}
    assert len(wrong) == 1
    assert TOKEN not in wrong.pop()
    assert "bearer token is needed" in refused(authenticator, None)


def test_a_token_ends_when_the_file_loses_it(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_files, "_LOOK_S", 0.0)
    authenticator = load_authenticator(settings(tmp_path, tokens=entry(TOKEN)))
    assert authenticator.identify(TOKEN).name == "shop"
    (tmp_path / "tokens.toml").write_text(entry(OTHER))
    refused(authenticator, TOKEN)
    assert authenticator.identify(OTHER).name == "shop"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tokens = 1",
        "[[tokens]]\nname = 'a'\nsha256 = 'zz'",
        "[[tokens]]\nname = 'a'\nsha256 = 'ab'",
        entry(TOKEN, role="king"),
        entry(TOKEN, tenant="a b"),
        entry(TOKEN, name=""),
        entry(TOKEN, token=TOKEN),
        "not toml",
    ],
)
def test_a_token_file_that_means_nothing_is_refused_without_saying_a_token(text: str) -> None:
    with pytest.raises(ValueError, match=r".+") as caught:
        parse_tokens(text.encode())
    assert TOKEN not in str(caught.value)


def test_a_signed_token_is_somebody(tmp_path: pathlib.Path) -> None:
    authenticator = load_authenticator(settings(tmp_path, keys=key_set(k1=KEY)))
    assert authenticator.identify(signed()) == Identity("alice", "acme", CallerRole.CLIENT)
    assert authenticator.identify(signed(lookonce_role="service")).role is CallerRole.SERVICE
    assert authenticator.identify(signed(aud=["x", AUDIENCE])).tenant == "acme"


# Header: alg none. Claims: sub alice, tenant acme.
UNSIGNED = "eyJhbGciOiJub25lIn0.eyJzdWIiOiJhbGljZSIsInRlbmFudCI6ImFjbWUifQ."
# A header of brackets only, nested deeper than a parser goes.
NESTED = base64.urlsafe_b64encode(b"[" * 6000).decode() + ".e30."
PAST = int(datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC).timestamp())


@pytest.mark.parametrize(
    "token",
    [
        signed(STRANGERS_KEY),
        signed(key_id="k2"),
        signed(key_id=None),
        signed(iss="https://evil.example"),
        signed(aud="another"),
        signed(aud=None),
        signed(iss=None),
        signed(exp=PAST),
        signed(exp=None),
        signed(nbf=int(time.time()) + 3600),
        signed(tenant=None),
        signed(tenant=""),
        signed(tenant="../other"),
        signed(tenant=7),
        signed(sub=None),
        signed(sub="a\nb"),
        signed(lookonce_role="king"),
        UNSIGNED,
        signed("k" * 64, algorithm="HS256"),
        # The key is for another algorithm.
        signed(RSA_KEY, algorithm="RS256"),
        NESTED,
        signed(exp=float("inf")),
        signed()[:-2],
        "a.b.c",
        "",
    ],
)
def test_every_other_token_is_refused_with_the_same_message(tmp_path: pathlib.Path, token: str) -> None:
    authenticator = load_authenticator(settings(tmp_path, keys=key_set(k1=KEY)))
    assert refused(authenticator, token) == "the bearer token is not accepted"


def test_the_public_key_is_no_shared_secret(tmp_path: pathlib.Path) -> None:
    # The classic forgery: signed with the public key, used as a symmetric key.
    published = json.loads(key_set(k1=KEY))["keys"][0]["x"]
    authenticator = load_authenticator(settings(tmp_path, keys=key_set(k1=KEY)))
    refused(authenticator, signed(published + "=" * 32, algorithm="HS256"))


def test_keys_change_while_tokens_of_the_next_key_come_in(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched_files, "_LOOK_S", 0.0)
    authenticator = load_authenticator(settings(tmp_path, keys=key_set(k1=KEY)))
    (tmp_path / "keys.json").write_bytes(key_set(k1=KEY, k2=STRANGERS_KEY))
    assert authenticator.identify(signed()).name == "alice"
    assert authenticator.identify(signed(STRANGERS_KEY, "k2")).name == "alice"
    (tmp_path / "keys.json").write_bytes(key_set(k2=STRANGERS_KEY))
    refused(authenticator, signed())


def test_both_kinds_of_tokens_are_accepted_together(tmp_path: pathlib.Path) -> None:
    authenticator = load_authenticator(settings(tmp_path, tokens=entry(TOKEN), keys=key_set(k1=KEY)))
    assert authenticator.identify(TOKEN).name == "shop"
    assert authenticator.identify(signed()).name == "alice"
    refused(authenticator, OTHER)


def test_rsa_keys_are_known_too(tmp_path: pathlib.Path) -> None:
    keys = {"keys": [{**json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(RSA_KEY.public_key())), "kid": "r"}]}
    authenticator = load_authenticator(settings(tmp_path, keys=json.dumps(keys).encode()))
    assert authenticator.identify(signed(RSA_KEY, "r", "RS256")).name == "alice"


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[]", b'{"keys": []}', b'{"keys": [{"kty": "oct", "k": "c2VjcmV0", "kid": "a"}]}', b"no json"],
)
def test_a_key_set_with_unusable_or_symmetric_keys_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_keys(content)


def test_a_key_without_an_id_is_refused() -> None:
    key = json.loads(jwt.algorithms.ECAlgorithm.to_jwk(KEY.public_key()))
    with pytest.raises(ValueError, match="kid"):
        parse_keys(json.dumps({"keys": [key]}).encode())


@pytest.mark.parametrize("content", [b"", b"\n", b"a\nb", b"a b\x00", "ä".encode()])
def test_a_client_s_token_file_holds_one_token(content: bytes) -> None:
    with pytest.raises(ValueError, match="one token"):
        parse_token(content)
    assert parse_token(b"  token\n") == "token"
