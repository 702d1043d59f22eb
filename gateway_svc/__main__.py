"""`python -m gateway_svc`: settings → HTTP server in front of a decoder, until SIGTERM."""

from __future__ import annotations

import asyncio
import os
import sys

from lookonce.errors import StartupError
from lookonce.local.serve_extra import GATEWAY_MODULES, require_packages


async def serve(arguments: list[str]) -> None:
    """Runs the gateway until SIGTERM. Raises StartupError when it must not start."""
    # Imported here, because `main` first checks that the packages of the extra `gateway` are installed.
    from gateway_svc.app import open_app
    from gateway_svc.serving import serve_until_stopped
    from gateway_svc.settings import GatewaySettings
    from lookonce import tracing
    from lookonce.logs import get_logger
    from lookonce.server.setting_names import unknown_variables
    from lookonce.server.settings import ServiceSettings, TracingVariables
    from lookonce.server.settings_parser import parse_settings
    from lookonce.server.telemetry import Telemetry, configure_logging

    settings = parse_settings(GatewaySettings, arguments, "gateway_svc")
    configure_logging(settings.log_format, settings.log_level)
    for warning in unknown_variables(os.environ, ServiceSettings.model_fields):
        get_logger(__name__).warning(warning)
    tracing.start("lookonce-gateway", TracingVariables().exporters)
    telemetry = Telemetry(settings.metrics_listen)
    telemetry.start_endpoint()
    try:
        async with open_app(settings, telemetry.registry) as (app, endpoints):
            await serve_until_stopped(settings, app, endpoints, telemetry.metrics_port)
    finally:
        telemetry.stop_endpoint()


def main() -> None:
    """Runs the gateway with the flags of the command line, and ends the process."""
    try:
        require_packages(GATEWAY_MODULES, "python -m gateway_svc", "gateway")
        asyncio.run(serve(sys.argv[1:]))
    except StartupError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
