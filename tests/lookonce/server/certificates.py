"""Certificates of servers and clients, as files that are replaced."""

from __future__ import annotations

import pathlib
import ssl

import trustme

HOST = "localhost"


class Files:
    """The certificates of a server and its clients, issued by one authority."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.certificate, self.key, self.authority = (folder / name for name in ("cert.pem", "key.pem", "ca.pem"))

    def issue(self, authority: trustme.CA) -> None:
        """Replaces the server's files by new ones, one after the other."""
        issued = authority.issue_cert(HOST, "127.0.0.1")
        issued.cert_chain_pems[0].write_to_path(self.certificate)
        issued.private_key_pem.write_to_path(self.key)
        authority.cert_pem.write_to_path(self.authority)

    def server_context(self, *, asks_for_certificates: bool) -> ssl.SSLContext:
        """Returns the settings of a server with these certificates, which may require a client certificate as well."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, self.key)
        if asks_for_certificates:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(self.authority)
        return context

    def client(self, authority: trustme.CA, name: str) -> tuple[pathlib.Path, pathlib.Path, pathlib.Path]:
        """Returns the (authorities, certificate, key) of a client."""
        paths = tuple(self.folder / f"{name}-{part}.pem" for part in ("ca", "cert", "key"))
        issued = authority.issue_cert(f"{name}.example")
        authority.cert_pem.write_to_path(paths[0])
        issued.cert_chain_pems[0].write_to_path(paths[1])
        issued.private_key_pem.write_to_path(paths[2])
        return paths[0], paths[1], paths[2]
