"""Typed settings that both services share. Flag > environment (LOOKONCE_…) > TOML file > default.

Settings are parsed once (settings_parser.py), in a service's `__main__`, and passed down.
"""

from __future__ import annotations

import ipaddress
import pathlib
from typing import Any, Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

MIB = 1 << 20
# Ten years. Redis refuses every write with a time to live that ends after its calendar.
_MAX_TTL_S = 10 * 365 * 86_400
# gRPC counts bytes of a message in 31 bits.
_MAX_MESSAGE_BYTES = 2047 * MIB
# A number that travels between the processes of a service has 63 bits.
_LARGEST_NUMBER = 1 << 60
# 23 days. gRPC counts its times in milliseconds, in 32 bits.
_MAX_DURATION_S = 2_000_000


class EnvironmentSettings(BaseSettings):
    """Base of the settings of each service: sources, their order, and names of flags and variables."""

    model_config = SettingsConfigDict(
        env_prefix="LOOKONCE_",
        frozen=True,
        extra="forbid",
        hide_input_in_errors=True,
        allow_inf_nan=False,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        protected_namespaces=(),
    )

    @model_validator(mode="after")
    def _check_numbers(self) -> Self:
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, int) and abs(value) > _LARGEST_NUMBER:
                raise ValueError(f"{name} must be at most {_LARGEST_NUMBER}")
        return self

    def are_given(self, *names: str) -> bool:
        """Whether somebody set all of these. A default that another setting makes pointless is no contradiction."""
        return self.model_fields_set.issuperset(names)

    def given_values(self) -> dict[str, Any]:
        """Returns all values that somebody set, as JSON has them, with the secrets among them.

        For a process of the same service only: its settings made of these values are equal to these settings.
        """
        values: dict[str, Any] = self.model_dump(mode="json", include=self.model_fields_set)
        for name in self.model_fields_set:
            value = getattr(self, name)
            if isinstance(value, SecretStr):
                values[name] = value.get_secret_value()
        return values

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Orders the sources: flags (added by `parse_settings`) > keyword arguments > environment > TOML."""
        sources: list[PydanticBaseSettingsSource] = [init_settings, env_settings]
        if settings_cls.model_config.get("toml_file"):
            sources.append(TomlConfigSettingsSource(settings_cls))
        return tuple(sources)


class ServiceSettings(EnvironmentSettings):
    """Settings of encoders and decoders: model, addresses, cache, limits, drain, telemetry."""

    model: pathlib.Path = Field(description="Folder of a Hugging Face vision-language model (safetensors).")
    served_model_name: str | None = Field(
        None, description="Name that clients may ask for. Default: the folder's name."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Element type of weights and activations. auto: the type of the checkpoint."
    )
    device: str = Field(
        "auto",
        min_length=1,
        description="Device that the model runs on: auto, cpu, cuda, or the name of a device from a plug-in. auto: the "
        "best device that this machine has, for example a CUDA device before the CPUs.",
    )
    num_threads: int | None = Field(
        None, ge=1, le=1024, description="Threads for tensor work. Default: one per CPU of this process."
    )

    deterministic: bool = Field(
        False,
        description="Equal prompts give equal bits, whatever is cached and whatever else runs: every image is encoded "
        "alone, and every token is computed together with the same others. Slower. Set it for encoders and decoders.",
    )

    listen: str = Field("127.0.0.1:0", description="host:port of the gRPC server; port 0 takes a free one.")
    insecure: bool = Field(False, description="Allow plaintext on an address other than loopback.")
    tls_cert: pathlib.Path | None = Field(None, description="PEM certificate chain of the server.")
    tls_key: pathlib.Path | None = Field(None, description="PEM private key of the server.")
    tls_client_ca: pathlib.Path | None = Field(
        None,
        description="PEM certificates of the authorities that sign clients' certificates. If set, clients must show a "
        "certificate. tls_cert, tls_key and this file are read again when they change.",
    )
    health_listen: str | None = Field(
        None,
        description="host:port that serves only health, in plaintext and without tokens, for probes that have neither "
        "certificates nor tokens. Unset: health is served on listen only.",
    )
    admin_listen: str | None = Field(
        None,
        description="host:port of reflection and of the operators' calls. Without tokens, everybody who can connect to "
        "an encoder's address can empty the cache, and to a decoder's load and unload adapters. Unset: these calls are "
        "not served.",
    )
    auth_tokens_file: pathlib.Path | None = Field(
        None,
        description="TOML file of the accepted tokens ([[tokens]] with name, sha256, tenant, role; see `lookonce "
        "token`), read again when it changes. Unset, and no auth_jwt_keys_file: calls need no token.",
    )
    auth_jwt_keys_file: pathlib.Path | None = Field(
        None,
        description="JSON Web Key Set with the public keys of an identity provider, whose tokens are accepted. Read "
        "again when it changes.",
    )
    auth_jwt_issuer: str | None = Field(None, description="Required issuer (claim iss) of JSON Web Tokens.")
    auth_jwt_audience: str | None = Field(None, description="Required audience (claim aud) of JSON Web Tokens.")
    auth_jwt_tenant_claim: str = Field("tenant", description="Claim of JSON Web Tokens that names the tenant.")
    quotas_file: pathlib.Path | None = Field(
        None,
        description="TOML file of quotas per tenant ([default] and [tenants.NAME] with max_in_flight, requests_per_s, "
        "image_bytes_per_s, image_pixels_per_s, tokens_per_s), read again when it changes. They apply to each process "
        "separately.",
    )
    ready_file: pathlib.Path | None = Field(
        None,
        description="File to write once the server accepts calls: JSON {target, admin_target, health_target, "
        "metrics_port, pid}.",
    )

    redis_url: SecretStr | None = Field(
        None,
        description="URL of the shared cache: redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://. "
        "Unset: this process uses no shared cache.",
    )
    redis_budget_s: float = Field(
        0.25,
        gt=0,
        le=10,
        description="Longest time of one attempt of a cache operation, seconds. The encoder makes two attempts.",
    )
    seal_key_file: pathlib.Path | None = Field(
        None,
        description="File of keys that encrypt and authenticate cache entries: 64 hex characters per line, the newest "
        "key first, the same file for all services. Unset: entries are protected by checksums only.",
    )
    tenant_secret_file: pathlib.Path | None = Field(
        None,
        description="File with a secret of 64 hex characters, the same for all services. Cache keys are derived from "
        "it, so that nobody without it can tell which image or tenant an entry belongs to. Unset: a public value.",
    )
    ttl_s: int = Field(
        86_400, ge=1, le=_MAX_TTL_S, description="Lifetime of a cache entry after its last use, seconds."
    )

    max_message_bytes: int = Field(
        32 * MIB, ge=MIB, le=_MAX_MESSAGE_BYTES, description="Largest gRPC message, in both directions."
    )
    max_receive_bytes: int = Field(
        1024 * MIB,
        ge=MIB,
        description="Memory for requests that can hold images while they are received, each counted as "
        "max_message_bytes; at least two are received at the same time. A tenant gets half of it (without "
        "authentication: a connection, whatever tenants it names). Further calls wait.",
    )
    max_queued_bytes: int = Field(
        1024 * MIB,
        ge=1,
        description="Maximum size of the files of images in all calls in progress, bytes, and in encoders of the rows "
        "that answers hold until they are taken, which count apart. Of each, a tenant gets at most as much as is free: "
        "alone half of it, and each of three a quarter.",
    )
    max_image_bytes: int = Field(20 * MIB, ge=1024, description="Largest accepted image file.")
    max_image_pixels: int = Field(50_000_000, ge=1, description="Largest accepted image, width times height in pixels.")
    keepalive_time_s: float = Field(
        30.0, gt=0, le=_MAX_DURATION_S, description="Idle time of a connection before a keepalive ping, seconds."
    )
    keepalive_timeout_s: float = Field(
        5.0, gt=0, le=_MAX_DURATION_S, description="Time to answer a ping before the connection is closed, seconds."
    )
    max_connection_age_s: float = Field(
        300.0,
        gt=0,
        le=_MAX_DURATION_S,
        description="Age at which a connection is asked to close, so that clients find new replicas, seconds. A random "
        "tenth is added or subtracted.",
    )
    max_connection_age_grace_s: float = Field(
        600.0,
        gt=0,
        le=_MAX_DURATION_S,
        description="Time in-flight calls get after their connection is asked to close, seconds.",
    )

    drain_delay_s: float = Field(
        0.0,
        ge=0,
        le=_MAX_DURATION_S,
        description="After SIGTERM: time between NOT_SERVING and the refusal of new calls, seconds.",
    )
    drain_timeout_s: float = Field(
        30.0,
        ge=0,
        le=_MAX_DURATION_S,
        description="After drain_delay_s: longest time for in-flight calls to finish, seconds.",
    )

    metrics_listen: str | None = Field(None, description="host:port of the Prometheus endpoint. Unset: no endpoint.")
    log_format: Literal["json", "console"] = Field(
        "json", description="json: one JSON object per line. console: for people."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Lowest level to log.")

    @field_validator("served_model_name")
    @classmethod
    def _check_name(cls, value: str | None) -> str | None:
        if value is not None and not value.strip():
            raise ValueError("is empty; give a name, or leave the setting out: the folder's name")
        return value

    @field_validator("listen", "admin_listen", "health_listen", "metrics_listen")
    @classmethod
    def _check_address(cls, value: str | None) -> str | None:
        return None if value is None else check_address(value)

    @model_validator(mode="after")
    def _check_transport(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together; set both or neither")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca needs tls_cert and tls_key")
        for name in ("listen", "admin_listen"):
            address = getattr(self, name)
            if address is not None and self.tls_cert is None and not self.insecure and not is_loopback(address):
                raise ValueError(
                    f"{name}={address} would serve plaintext on a non-loopback address; "
                    "set tls_cert and tls_key, or insecure if another layer encrypts"
                )
        return self

    @model_validator(mode="after")
    def _check_addresses(self) -> Self:
        names = ("listen", "admin_listen", "health_listen", "metrics_listen")
        taken: dict[str, str] = {}
        for name in names:
            address = getattr(self, name)
            if address is None or address.endswith(":0"):
                continue
            if address in taken:
                raise ValueError(f"{taken[address]} and {name} are both {address}; give each an address of its own")
            taken[address] = name
        return self

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if self.are_given("max_image_bytes", "max_message_bytes") and self.max_image_bytes > self.max_message_bytes:
            raise ValueError(
                f"max_image_bytes={self.max_image_bytes} can never arrive in a message of at most "
                f"max_message_bytes={self.max_message_bytes}; lower the former or raise the latter"
            )
        if self.are_given("max_queued_bytes", "max_message_bytes") and self.max_queued_bytes < self.max_message_bytes:
            raise ValueError(
                f"max_queued_bytes={self.max_queued_bytes} must be at least "
                f"max_message_bytes={self.max_message_bytes}, or a large call can never be served"
            )
        return self

    @model_validator(mode="after")
    def _check_tokens(self) -> Self:
        jwt_settings = [self.auth_jwt_keys_file, self.auth_jwt_issuer, self.auth_jwt_audience]
        if any(value is None for value in jwt_settings) and any(value is not None for value in jwt_settings):
            raise ValueError("auth_jwt_keys_file, auth_jwt_issuer and auth_jwt_audience belong together")
        has_tokens = self.auth_tokens_file is not None or self.auth_jwt_keys_file is not None
        if has_tokens and self.tls_cert is None and not self.insecure and not is_loopback(self.listen):
            raise ValueError("tokens would travel in plaintext; set tls_cert and tls_key")
        if self.quotas_file is not None and not has_tokens:
            raise ValueError(
                "quotas_file needs auth_tokens_file or auth_jwt_keys_file, which tell the tenant of a call"
            )
        return self

    @property
    def model_name(self) -> str:
        """The name that clients may give in `model`."""
        return self.served_model_name or self.model.resolve().name


class TracingVariables(BaseSettings):
    """The standard variables that switch OpenTelemetry's traces on. OpenTelemetry reads all others itself."""

    model_config = SettingsConfigDict(env_prefix="OTEL_", frozen=True, extra="ignore")

    sdk_disabled: str = ""
    traces_exporter: str = ""
    exporter_otlp_endpoint: str = ""
    exporter_otlp_traces_endpoint: str = ""
    exporter_otlp_protocol: str = ""
    exporter_otlp_traces_protocol: str = ""

    @property
    def exporters(self) -> tuple[str, ...]:
        """Registered names of the requested exporters. An endpoint without an exporter requests OTLP."""
        if self.sdk_disabled.strip().lower() == "true":
            return ()
        has_endpoint = bool(self.exporter_otlp_endpoint or self.exporter_otlp_traces_endpoint)
        asked = self.traces_exporter or ("otlp" if has_endpoint else "none")
        protocol = self.exporter_otlp_traces_protocol or self.exporter_otlp_protocol
        otlp = "otlp_proto_http" if protocol.strip() == "http/protobuf" else "otlp_proto_grpc"
        names = [name.strip().lower() for name in asked.split(",")]
        return tuple(otlp if name == "otlp" else name for name in names if name not in ("", "none"))


def check_address(value: str) -> str:
    """Returns an address to listen on. Raises ValueError for what is no host:port."""
    host, _, port = value.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ValueError("must be host:port with a port of 0..65535, for example 127.0.0.1:50051")
    return value


def is_loopback(address: str) -> bool:
    """Returns whether host:port can be reached from this machine only."""
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
