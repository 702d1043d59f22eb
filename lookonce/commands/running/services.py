"""The services that commands start and describe, and their settings, which are imported by name when needed."""

from __future__ import annotations

import enum
import importlib
from collections.abc import Mapping

from lookonce.server.settings import EnvironmentSettings


class Service(enum.StrEnum):
    """The services, by the names that `lookonce serve` gives them."""

    ENCODER = "encoder"
    DECODER = "decoder"
    GATEWAY = "gateway"


# Module and class of each service's settings. The package lookonce imports no service; a command only names them.
_SETTINGS: Mapping[Service, tuple[str, str]] = {
    Service.ENCODER: ("encoder_svc.settings", "EncoderSettings"),
    Service.DECODER: ("decoder_svc.settings", "DecoderSettings"),
    Service.GATEWAY: ("gateway_svc.settings", "GatewaySettings"),
}


def settings_class(service: Service) -> type[EnvironmentSettings]:
    """Returns the class of a service's settings."""
    module, name = _SETTINGS[service]
    found: type[EnvironmentSettings] = getattr(importlib.import_module(module), name)
    return found
