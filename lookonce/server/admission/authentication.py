"""Bearer token → identity: tokens from a file, or JSON Web Tokens (RFC 7519) under keys from a file.

Two files decide who is accepted. They are read again when they change; nothing is fetched over a network.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from lookonce.errors import UnauthenticatedError
from lookonce.identity import ANYBODY, TENANT_NAME, CallerRole, Identity
from lookonce.server.settings import ServiceSettings
from lookonce.server.watched_files import WatchedFiles

if TYPE_CHECKING:
    from jwt import PyJWK

_NAME = re.compile(r"[A-Za-z0-9._@:/-]{1,128}")
# Signatures of key pairs only, so that a service that checks tokens cannot make any.
_ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "EdDSA")
# Tolerance for clocks that differ, seconds.
_LEEWAY_S = 30
_REQUIRED_CLAIMS = ("exp", "sub")


class Authenticator(Protocol):
    """Decides who a caller is."""

    def identify(self, token: str | None) -> Identity:
        """Returns the caller of a bearer token (None: no token was sent). Raises UnauthenticatedError."""
        ...


class Unguarded:
    """Accepts every call without a token."""

    def identify(self, token: str | None) -> Identity:
        """Returns the identity that may do everything, whatever the token is."""
        return ANYBODY


@dataclass(frozen=True, slots=True)
class KnownToken:
    """One entry of a token file."""

    # SHA-256 of the token.
    digest: bytes
    identity: Identity


class TokenFile:
    """Tokens of a file. The file holds their digests only, so that reading it gives nobody a token."""

    def __init__(self, tokens: WatchedFiles[Sequence[KnownToken]]) -> None:
        self._tokens = tokens

    def identify(self, token: str | None) -> Identity:
        """Returns the matching entry's identity. Compares all, so that the time does not tell which one matched."""
        digest = hashlib.sha256((token or "").encode()).digest()
        found = None
        for known in self._tokens.value:
            if hmac.compare_digest(known.digest, digest):
                found = known.identity
        if token is None or found is None:
            raise _refused(token)
        return found


class JsonWebTokens:
    """Signed tokens of an identity provider, with its public keys (a JWKS, RFC 7517) in a file."""

    def __init__(self, keys: WatchedFiles[Mapping[str, PyJWK]], issuer: str, audience: str, tenant_claim: str) -> None:
        self._keys = keys
        self._issuer, self._audience, self._tenant_claim = issuer, audience, tenant_claim

    def identify(self, token: str | None) -> Identity:
        """Returns the identity that the token's claims state.

        Raises UnauthenticatedError, also for a token without a tenant or for another audience.
        """
        import jwt

        if token is None:
            raise _refused(token)
        try:
            key = self._keys.value.get(str(jwt.get_unverified_header(token).get("kid", "")))
            if key is None:
                raise _refused(token)
            claims = jwt.decode(
                token,
                key=key,
                algorithms=list(_ALGORITHMS),
                issuer=self._issuer,
                audience=self._audience,
                leeway=_LEEWAY_S,
                options={"require": list(_REQUIRED_CLAIMS)},
            )
            tenant = _text(claims, self._tenant_claim, TENANT_NAME)
            if not tenant:
                raise _refused(token)
            return Identity(_text(claims, "sub", _NAME), tenant, CallerRole(claims.get("lookonce_role", "client")))
        except (jwt.PyJWTError, ValueError, OverflowError, RecursionError):
            # The library's message is dropped because it quotes the token. Huge numbers raise OverflowError, and deeply
            # nested JSON raises RecursionError.
            raise _refused(token) from None


class EitherOf:
    """Several authenticators, of which one must accept the token."""

    def __init__(self, authenticators: Sequence[Authenticator]) -> None:
        self._authenticators = tuple(authenticators)

    def identify(self, token: str | None) -> Identity:
        """Returns the answer of the first authenticator that accepts the token."""
        for authenticator in self._authenticators:
            try:
                return authenticator.identify(token)
            except UnauthenticatedError:
                continue
        raise _refused(token)


def load_authenticator(settings: ServiceSettings) -> Authenticator:
    """Returns the authenticator that the settings name. Raises ConfigurationError for files that cannot be used."""
    found: list[Authenticator] = []
    if settings.auth_tokens_file is not None:
        found.append(TokenFile(WatchedFiles("auth_tokens_file", (settings.auth_tokens_file,), parse_tokens)))
    if settings.auth_jwt_keys_file is not None:
        keys = WatchedFiles("auth_jwt_keys_file", (settings.auth_jwt_keys_file,), parse_keys)
        assert settings.auth_jwt_issuer is not None, "the settings check that these belong together"
        assert settings.auth_jwt_audience is not None, "the settings check that these belong together"
        found.append(
            JsonWebTokens(keys, settings.auth_jwt_issuer, settings.auth_jwt_audience, settings.auth_jwt_tenant_claim)
        )
    return EitherOf(found) if found else Unguarded()


def parse_token(content: bytes) -> str:
    """Parses a client's token file, which holds one token. Raises ValueError."""
    token = content.decode().strip()
    if not token or not token.isascii() or not token.isprintable():
        raise ValueError("must hold one token and nothing else")
    return token


def parse_tokens(content: bytes) -> Sequence[KnownToken]:
    """Parses a token file: TOML with `[[tokens]]` of `name`, `sha256` (64 hex characters), `tenant`, `role` (client).

    Raises ValueError with a message that never contains a token.
    """
    document = tomllib.loads(content.decode())
    if set(document) != {"tokens"} or not isinstance(document["tokens"], list):
        raise ValueError("must hold [[tokens]] and nothing else")
    return [_known_token(index, entry) for index, entry in enumerate(document["tokens"])]


def parse_keys(content: bytes) -> Mapping[str, PyJWK]:
    """Parses a JSON Web Key Set into keys by id.

    Each key is for one algorithm: its `alg`, else RS256 for RSA keys and the algorithm of the curve for others. Raises
    ValueError, also for keys without an id and for symmetric keys.
    """
    import jwt

    try:
        key_set = jwt.PyJWKSet.from_dict(json.loads(content))
    except (jwt.PyJWTError, AttributeError, TypeError) as error:
        raise ValueError(f"is no JSON Web Key Set: {error}") from None
    keys: dict[str, PyJWK] = {}
    for key in key_set.keys:
        if not key.key_id or key.algorithm_name not in _ALGORITHMS:
            raise ValueError(f"has a key without a kid, or with an algorithm other than {', '.join(_ALGORITHMS)}")
        keys[key.key_id] = key
    return keys


def _known_token(index: int, entry: Any) -> KnownToken:
    where = f"tokens[{index}]"
    if not isinstance(entry, dict) or not set(entry) <= {"name", "sha256", "tenant", "role"}:
        raise ValueError(f"{where} must have name, sha256, tenant and role, and nothing else")
    try:
        digest = bytes.fromhex(str(entry.get("sha256", "")))
        role = CallerRole(entry.get("role", "client"))
    except ValueError:
        raise ValueError(f"{where}: sha256 must be hex, role one of client, service, operator") from None
    if len(digest) != hashlib.sha256().digest_size:
        raise ValueError(f"{where}: sha256 must have 64 hex characters")
    return KnownToken(digest, Identity(_text(entry, "name", _NAME), _text(entry, "tenant", TENANT_NAME), role))


def _text(values: Mapping[str, Any], name: str, allowed: re.Pattern[str]) -> str:
    value = values.get(name, "")
    if not isinstance(value, str) or not allowed.fullmatch(value):
        raise ValueError(f"{name} must match {allowed.pattern}")
    return value


def _refused(token: str | None) -> UnauthenticatedError:
    if token is None:
        return UnauthenticatedError("a bearer token is needed: send it as authorization: Bearer …")
    return UnauthenticatedError("the bearer token is not accepted")
