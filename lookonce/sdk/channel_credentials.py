"""TLS of a client. Needs gRPC only, for the SDK has nothing else."""

from __future__ import annotations

import pathlib

import grpc

from lookonce.errors import ConfigurationError


def channel_credentials(
    authorities: pathlib.Path | None, certificate: pathlib.Path | None, key: pathlib.Path | None
) -> grpc.ChannelCredentials | None:
    """Of a client that trusts `authorities` and may show a certificate; None, for plaintext, without authorities.

    Raises ConfigurationError for files that cannot be read, and for half a pair.
    """
    if (certificate is None) != (key is None):
        raise ConfigurationError("a certificate and its key belong together; give both or neither")
    if authorities is None:
        if certificate is not None:
            raise ConfigurationError("a client's certificate needs the authorities that the server is checked against")
        return None
    if certificate is None or key is None:
        return grpc.ssl_channel_credentials(_content(authorities))
    return grpc.ssl_channel_credentials(_content(authorities), _content(key), _content(certificate))


def _content(path: pathlib.Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"TLS: cannot read {path}: {error.strerror}") from None
