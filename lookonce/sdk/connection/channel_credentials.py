"""TLS credentials of a client. Uses gRPC only, since the SDK must not need a cryptography package."""

from __future__ import annotations

import pathlib
import ssl

import grpc

from lookonce.errors import ConfigurationError

SYSTEM = pathlib.Path("system")
"""In place of a file: the authorities that the operating system trusts. libpq has the same word for them."""

_PEM_MARK = b"-----BEGIN "
# Files with the system's authorities: of Debian, Fedora, SUSE, Alpine and macOS. gRPC has its own ones from its build.
_SYSTEM_FILES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)


def channel_credentials(
    authorities: pathlib.Path | None, certificate: pathlib.Path | None, key: pathlib.Path | None
) -> grpc.ChannelCredentials | None:
    """Returns the credentials of a client that trusts `authorities` and may have a certificate of its own.

    `authorities` is a PEM file or SYSTEM.
    Returns None, for plaintext, without authorities. Raises ConfigurationError for files that are no PEM files, for a
    certificate without its key or a key without its certificate, and for a certificate without authorities.
    """
    if (certificate is None) != (key is None):
        raise ConfigurationError("a client's certificate and its key belong together; give both or neither")
    if authorities is None:
        if certificate is not None:
            raise ConfigurationError("a client's certificate needs tls_ca, the authorities of the server's certificate")
        return None
    roots = _content(_system_file() if authorities == SYSTEM else authorities)
    if certificate is None or key is None:
        return grpc.ssl_channel_credentials(roots)
    return grpc.ssl_channel_credentials(roots, _content(key), _content(certificate))


def _system_file() -> pathlib.Path:
    """Returns the file of SSL_CERT_FILE or OpenSSL, else the system's. Raises ConfigurationError if there is none."""
    candidates = [ssl.get_default_verify_paths().cafile, *_SYSTEM_FILES]
    for candidate in candidates:
        if candidate is not None and pathlib.Path(candidate).is_file():
            return pathlib.Path(candidate)
    raise ConfigurationError("TLS: this system has no file of authorities that is known here; name one as tls_ca")


def _content(path: pathlib.Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"TLS: cannot read {path}: {error.strerror}") from None
    # gRPC would notice it at the first call, and only say that the server cannot be reached.
    if _PEM_MARK not in content:
        raise ConfigurationError(f"TLS: {path} is no PEM file")
    return content
