"""TLS credentials of a server. New certificate files take effect without a restart."""

from __future__ import annotations

import functools

import grpc

from lookonce.server.settings import ServiceSettings
from lookonce.server.watched_files import WatchedFiles


def server_credentials(settings: ServiceSettings) -> grpc.ServerCredentials | None:
    """Returns credentials from the settings' files, or None for plaintext.

    With `tls_client_ca`, clients must show a certificate. Each new connection uses the current content of the files;
    existing connections continue. Raises ConfigurationError for unusable files.
    """
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    paths = [settings.tls_key, settings.tls_cert]
    if settings.tls_client_ca is not None:
        paths.append(settings.tls_client_ca)
    files = WatchedFiles("tls_cert, tls_key, tls_client_ca", tuple(paths), _configuration)
    first = files.value
    return grpc.dynamic_ssl_server_credentials(
        first,
        functools.partial(_current, files),
        require_client_authentication=settings.tls_client_ca is not None,
    )


def _current(files: WatchedFiles[grpc.ServerCertificateConfiguration]) -> grpc.ServerCertificateConfiguration:
    """Returns the current certificates. gRPC calls it at each handshake, on a thread of its own."""
    return files.value


def _configuration(
    key: bytes, certificates: bytes, authorities: bytes | None = None
) -> grpc.ServerCertificateConfiguration:
    """Parses PEM files.

    Raises ValueError for malformed ones, and for a key that does not belong to the certificate, as in the middle of a
    rotation.
    """
    # Imported here, because a service without TLS need not hold the library.
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization

    own = x509.load_pem_x509_certificates(certificates)[0]
    if authorities is not None:
        x509.load_pem_x509_certificates(authorities)
    form = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    private = serialization.load_pem_private_key(key, password=None)
    if private.public_key().public_bytes(*form) != own.public_key().public_bytes(*form):
        raise ValueError("do not belong together")
    return grpc.ssl_server_certificate_configuration([(key, certificates)], root_certificates=authorities)
