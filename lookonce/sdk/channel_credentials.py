"""TLS credentials of a client. Uses gRPC only, since the SDK must not need a cryptography package."""

from __future__ import annotations

import pathlib

import grpc

from lookonce.errors import ConfigurationError

_PEM_MARK = b"-----BEGIN "


def channel_credentials(
    authorities: pathlib.Path | None, certificate: pathlib.Path | None, key: pathlib.Path | None
) -> grpc.ChannelCredentials | None:
    """Returns the credentials of a client that trusts `authorities` and may have a certificate of its own.

    Returns None, for plaintext, without authorities. Raises ConfigurationError for files that are no PEM files, for a
    certificate without its key or a key without its certificate, and for a certificate without authorities.
    """
    if (certificate is None) != (key is None):
        raise ConfigurationError("a client's certificate and its key belong together; give both or neither")
    if authorities is None:
        if certificate is not None:
            raise ConfigurationError("a client's certificate needs tls_ca, the authorities of the server's certificate")
        return None
    if certificate is None or key is None:
        return grpc.ssl_channel_credentials(_content(authorities))
    return grpc.ssl_channel_credentials(_content(authorities), _content(key), _content(certificate))


def _content(path: pathlib.Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"TLS: cannot read {path}: {error.strerror}") from None
    # gRPC would notice it at the first call, and only say that the server cannot be reached.
    if _PEM_MARK not in content:
        raise ConfigurationError(f"TLS: {path} is no PEM file")
    return content
