"""Typed settings that both services share. Flag > environment (LOOKONCE_…) > TOML file > default.

Parsed once in a service's `__main__` and passed down; nothing here does I/O beyond reading the TOML file.
"""

from __future__ import annotations

import ipaddress
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, Literal, Self, TypeVar

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

from lookonce.errors import ConfigurationError

MIB = 1 << 20


class ServiceSettings(BaseSettings):
    """What every Lookonce process is told: model, addresses, cache, limits, drain, telemetry."""

    model_config = SettingsConfigDict(
        env_prefix="LOOKONCE_",
        frozen=True,
        extra="forbid",
        hide_input_in_errors=True,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        protected_namespaces=(),
    )

    model: pathlib.Path = Field(description="Folder of a Hugging Face vision-language model (safetensors).")
    served_model_name: str | None = Field(
        None, description="Name that clients may ask for. Default: the folder's name."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Element type of weights and activations. auto: what the checkpoint says."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where the model runs. auto: on a CUDA device where PyTorch sees one, else on the CPUs."
    )
    num_threads: int | None = Field(
        None, ge=1, description="Threads for tensor work. Default: the CPUs of this process."
    )

    deterministic: bool = Field(
        False,
        description="Every image is encoded alone, every token computed in the same company whatever is cached: equal "
        "bits for equal prompts. Slower; wanted from encoders and decoders alike.",
    )

    listen: str = Field("127.0.0.1:0", description="host:port of the gRPC server; port 0 takes a free one.")
    insecure: bool = Field(False, description="Allow plaintext on an address other than loopback.")
    tls_cert: pathlib.Path | None = Field(None, description="PEM certificate chain of the server.")
    tls_key: pathlib.Path | None = Field(None, description="PEM private key of the server.")
    tls_client_ca: pathlib.Path | None = Field(
        None,
        description="PEM certificates of the authorities that sign clients' certificates. Set: nobody connects without "
        "one. These three files are read again when they change.",
    )
    health_listen: str | None = Field(
        None,
        description="host:port where health alone is served, in plaintext and without tokens: for probes, which know "
        "neither. Unset: not served apart.",
    )
    admin_listen: str | None = Field(
        None,
        description="host:port of reflection and of the operators' calls, apart from those of clients: without tokens, "
        "whoever reaches an encoder's may empty the cache. Unset: they are not served.",
    )
    auth_tokens_file: pathlib.Path | None = Field(
        None,
        description="TOML file of the tokens that are accepted ([[tokens]] with name, sha256, tenant, role; see "
        "`lookonce token`), read again when it changes. Unset, and no auth_jwt_keys_file: no token is asked for.",
    )
    auth_jwt_keys_file: pathlib.Path | None = Field(
        None,
        description="JSON Web Key Set with the public keys of an identity provider, read again when it changes. Its "
        "tokens are accepted as well.",
    )
    auth_jwt_issuer: str | None = Field(None, description="What JSON Web Tokens must have as iss.")
    auth_jwt_audience: str | None = Field(None, description="What JSON Web Tokens must have in aud.")
    auth_jwt_tenant_claim: str = Field("tenant", description="Claim of JSON Web Tokens that names the tenant.")
    quotas_file: pathlib.Path | None = Field(
        None,
        description="TOML file of what tenants may ask for ([default] and [tenants.NAME] with max_in_flight, "
        "requests_per_s, image_bytes_per_s, tokens_per_s), read again when it changes; each process counts for itself.",
    )
    ready_file: pathlib.Path | None = Field(
        None,
        description="Written as JSON {target, admin_target, health_target, metrics_port, pid} once the server accepts "
        "calls.",
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
        description="Longest time one attempt of a cache operation may take, seconds; the encoder makes two.",
    )
    seal_key_file: pathlib.Path | None = Field(
        None,
        description="File of keys that encrypt and authenticate cache entries, 64 hex characters per line, the newest "
        "first; the same for all services. Unset: entries carry checksums only.",
    )
    tenant_secret_file: pathlib.Path | None = Field(
        None,
        description="File with 64 hex characters, the same for all services: cache keys are made under it, so that "
        "nobody without it can tell which image or tenant an entry belongs to. Unset: a public value.",
    )
    ttl_s: int = Field(86_400, ge=1, description="Life of a cache entry after its last use, seconds.")

    max_message_bytes: int = Field(64 * MIB, ge=MIB, description="Largest gRPC message, both directions.")
    max_image_bytes: int = Field(20 * MIB, ge=1024, description="Largest accepted image file.")
    max_image_pixels: int = Field(50_000_000, ge=1, description="Largest accepted width times height.")
    keepalive_time_s: float = Field(30.0, gt=0, description="Idle time before a keepalive ping, seconds.")
    keepalive_timeout_s: float = Field(
        5.0, gt=0, description="A peer that does not answer a ping so long is gone, seconds."
    )
    max_connection_age_s: float = Field(
        300.0,
        gt=0,
        description="Connections are asked to end after this time, so that clients find new replicas, seconds; a tenth "
        "more or less, by chance.",
    )
    max_connection_age_grace_s: float = Field(
        600.0, gt=0, description="So long calls on such a connection may still take, seconds."
    )

    drain_delay_s: float = Field(
        0.0, ge=0, description="SIGTERM: time between NOT_SERVING and refusing calls, seconds."
    )
    drain_timeout_s: float = Field(30.0, ge=0, description="SIGTERM: longest time in-flight calls may take, seconds.")

    metrics_listen: str | None = Field(None, description="host:port of the Prometheus endpoint. Unset: none.")
    log_format: Literal["json", "console"] = Field("json", description="One JSON object per line, or for people.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe level to log.")

    @field_validator("listen", "admin_listen", "health_listen", "metrics_listen")
    @classmethod
    def _check_address(cls, value: str | None) -> str | None:
        if value is None:
            return None
        host, _, port = value.rpartition(":")
        if not host or not port.isdigit() or int(port) > 65535:
            raise ValueError("must be host:port with a port of 0..65535, for example 127.0.0.1:50051")
        return value

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
                    "set tls_cert and tls_key, or say insecure if another layer encrypts"
                )
        return self

    @model_validator(mode="after")
    def _check_tokens(self) -> Self:
        told = [self.auth_jwt_keys_file, self.auth_jwt_issuer, self.auth_jwt_audience]
        if any(value is None for value in told) and any(value is not None for value in told):
            raise ValueError("auth_jwt_keys_file, auth_jwt_issuer and auth_jwt_audience belong together")
        has_tokens = self.auth_tokens_file is not None or self.auth_jwt_keys_file is not None
        if has_tokens and self.tls_cert is None and not self.insecure and not is_loopback(self.listen):
            raise ValueError("tokens would travel in plaintext; set tls_cert and tls_key")
        if self.quotas_file is not None and not has_tokens:
            raise ValueError(
                "quotas_file needs auth_tokens_file or auth_jwt_keys_file, which say whose calls are whose"
            )
        return self

    @property
    def model_name(self) -> str:
        """The name clients may put into `model`."""
        return self.served_model_name or self.model.resolve().name

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags (added by `parse_settings`) > keyword arguments > environment > TOML."""
        sources: list[PydanticBaseSettingsSource] = [init_settings, env_settings]
        if settings_cls.model_config.get("toml_file"):
            sources.append(TomlConfigSettingsSource(settings_cls))
        return tuple(sources)


class TracingVariables(BaseSettings):
    """The standard variables by which OpenTelemetry is asked for traces; all others are read by itself."""

    model_config = SettingsConfigDict(env_prefix="OTEL_", frozen=True, extra="ignore")

    sdk_disabled: str = ""
    traces_exporter: str = ""
    exporter_otlp_endpoint: str = ""
    exporter_otlp_traces_endpoint: str = ""
    exporter_otlp_protocol: str = ""
    exporter_otlp_traces_protocol: str = ""

    @property
    def exporters(self) -> tuple[str, ...]:
        """Names under which the exporters that are asked for are registered; an endpoint alone asks for OTLP."""
        if self.sdk_disabled.strip().lower() == "true":
            return ()
        has_endpoint = bool(self.exporter_otlp_endpoint or self.exporter_otlp_traces_endpoint)
        asked = self.traces_exporter or ("otlp" if has_endpoint else "none")
        protocol = self.exporter_otlp_traces_protocol or self.exporter_otlp_protocol
        otlp = "otlp_proto_http" if protocol.strip() == "http/protobuf" else "otlp_proto_grpc"
        names = [name.strip().lower() for name in asked.split(",")]
        return tuple(otlp if name == "otlp" else name for name in names if name not in ("", "none"))


SettingsT = TypeVar("SettingsT", bound=ServiceSettings)


def is_loopback(address: str) -> bool:
    """Whether host:port can be reached from this machine only."""
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def parse_settings(settings_class: type[SettingsT], arguments: Sequence[str], program: str) -> SettingsT:
    """Settings from flags, environment and `--config FILE.toml`.

    Raises ConfigurationError naming each wrong field and what it should be; `--help` prints and exits as argparse does.
    """
    arguments, config = _split_config(list(arguments))
    overrides = SettingsConfigDict(toml_file=config, cli_prog_name=program)
    attributes = {"model_config": overrides, "__doc__": settings_class.__doc__, "__module__": settings_class.__module__}
    configured: Any = type(settings_class.__name__, (settings_class,), attributes)
    try:
        settings: SettingsT = configured(_cli_parse_args=arguments)
    except ValidationError as error:
        lines = [f"{_flag(item['loc'])}: {item['msg'].removeprefix('Value error, ')}" for item in error.errors()]
        raise ConfigurationError("; ".join(lines)) from None
    return settings


def exit_with(error: Exception) -> None:
    """Ends the process before it served anything: the reason on stderr, status 2."""
    print(f"error: {error}", file=sys.stderr)
    raise SystemExit(2)


def _split_config(arguments: list[str]) -> tuple[list[str], pathlib.Path | None]:
    for index, argument in enumerate(arguments):
        if argument == "--config" and index + 1 < len(arguments):
            return arguments[:index] + arguments[index + 2 :], _existing(arguments[index + 1])
        if argument.startswith("--config="):
            return arguments[:index] + arguments[index + 1 :], _existing(argument.removeprefix("--config="))
    return arguments, None


def _existing(name: str) -> pathlib.Path:
    path = pathlib.Path(name)
    if not path.is_file():
        raise ConfigurationError(f"--config: {name} is not a file")
    return path


def _flag(location: tuple[int | str, ...]) -> str:
    return "--" + ".".join(str(part) for part in location).replace("_", "-") if location else "settings"
