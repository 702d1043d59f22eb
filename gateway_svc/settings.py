"""Typed settings of the gateway. Flag > environment (LOOKONCE_…) > TOML file > default."""

from __future__ import annotations

import pathlib
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from lookonce.errors import ConfigurationError
from lookonce.sdk.connection.target import checked_target
from lookonce.server.settings import MIB, EnvironmentSettings, check_address, is_loopback

_MAX_DURATION_S = 2_000_000


class GatewaySettings(EnvironmentSettings):
    """Settings of the gateway: its address, its decoder, limits, images by URL, playground, drain, telemetry."""

    listen: str = Field("127.0.0.1:8000", description="host:port of the HTTP server; port 0 takes a free one.")
    insecure: bool = Field(False, description="Allow plaintext on an address other than loopback.")
    tls_cert: pathlib.Path | None = Field(None, description="PEM certificate chain of the server.")
    tls_key: pathlib.Path | None = Field(None, description="PEM private key of the server.")
    ready_file: pathlib.Path | None = Field(
        None, description="File to write once the server accepts calls: JSON {target, metrics_port, pid}."
    )

    decoder_target: str = Field(description="gRPC target of the decoder, for example dns:///decoder:50051.")
    decoder_tls_ca: pathlib.Path | None = Field(
        None, description="PEM certificates of the authorities that sign decoders' certificates. Unset: plaintext."
    )
    decoder_tls_cert: pathlib.Path | None = Field(
        None, description="PEM certificate chain that this gateway shows to decoders."
    )
    decoder_tls_key: pathlib.Path | None = Field(None, description="PEM private key of decoder_tls_cert.")
    token_over_plaintext: bool = Field(
        False,
        description="Send the keys of callers to a decoder on another machine without TLS, for example in a mesh with "
        "mutual TLS.",
    )
    request_timeout_s: float = Field(
        600.0, gt=0, le=_MAX_DURATION_S, description="Longest time for the answer to a request, seconds."
    )

    max_body_bytes: int = Field(64 * MIB, ge=1024, description="Largest request. Images in it grow by a third.")
    max_buffered_bytes: int = Field(
        1024 * MIB,
        ge=1024,
        description="Memory for the requests and the fetched images of all calls in progress. Further calls get the "
        "status 429.",
    )
    image_hosts: str = Field(
        "",
        description="Hosts from which images are fetched that requests name by URL, separated by commas: names, "
        "*.names for all below one, or * for all; each with a port unless it is the scheme's. Public addresses only. "
        "Empty: requests must contain their images.",
    )
    private_image_hosts: str = Field(
        "", description="Names of hosts, as in image_hosts but without *, whose addresses may be private."
    )
    max_image_bytes: int = Field(20 * MIB, ge=1024, description="Largest image that is fetched.")
    image_timeout_s: float = Field(10.0, gt=0, le=3600, description="Longest time to fetch an image, seconds.")

    playground: bool = Field(
        False, description="Serve the playground at /: a page on which people ask questions through this gateway."
    )

    drain_delay_s: float = Field(
        0.0,
        ge=0,
        le=_MAX_DURATION_S,
        description="After SIGTERM: time in which /health says that the gateway ends and it still takes new calls, "
        "seconds.",
    )
    drain_timeout_s: float = Field(
        30.0,
        ge=0,
        le=_MAX_DURATION_S,
        description="After drain_delay_s: longest time for calls in progress to finish, seconds.",
    )
    metrics_listen: str | None = Field(None, description="host:port of the Prometheus endpoint. Unset: no endpoint.")
    log_format: Literal["json", "console"] = Field(
        "json", description="json: one JSON object per line. console: for people."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Lowest level to log.")

    @field_validator("listen", "metrics_listen")
    @classmethod
    def _check_address(cls, value: str | None) -> str | None:
        return None if value is None else check_address(value)

    @field_validator("decoder_target")
    @classmethod
    def _check_target(cls, value: str) -> str:
        try:
            return checked_target(value)
        except ConfigurationError as error:
            raise ValueError(error.message) from None

    @model_validator(mode="after")
    def _check_transport(self) -> Self:
        for first, second in (("tls_cert", "tls_key"), ("decoder_tls_cert", "decoder_tls_key")):
            if (getattr(self, first) is None) != (getattr(self, second) is None):
                raise ValueError(f"{first} and {second} belong together; set both or neither")
        if self.decoder_tls_cert is not None and self.decoder_tls_ca is None:
            raise ValueError("decoder_tls_cert needs decoder_tls_ca; without it, calls to decoders are plaintext")
        if self.tls_cert is None and not self.insecure and not is_loopback(self.listen):
            raise ValueError(
                f"listen={self.listen} would serve plaintext on a non-loopback address; "
                "set tls_cert and tls_key, or insecure if another layer encrypts"
            )
        if self.max_body_bytes > self.max_buffered_bytes:
            raise ValueError("max_buffered_bytes must be at least max_body_bytes, or a large call can never be served")
        has_hosts = bool(self.image_host_names or self.private_image_host_names)
        if has_hosts and self.max_image_bytes > self.max_buffered_bytes:
            raise ValueError("max_buffered_bytes must be at least max_image_bytes, or no image can ever be fetched")
        return self

    @property
    def image_host_names(self) -> list[str]:
        """The hosts that image_hosts names."""
        return _names(self.image_hosts)

    @property
    def private_image_host_names(self) -> list[str]:
        """The hosts that private_image_hosts names."""
        return _names(self.private_image_hosts)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
