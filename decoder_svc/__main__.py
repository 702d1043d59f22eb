"""`python -m decoder_svc`: settings → model → engine → gRPC server, until SIGTERM."""

from __future__ import annotations

import sys

from decoder_svc.settings import DecoderSettings
from lookonce import tracing
from lookonce.errors import ConfigurationError
from lookonce.local.serve_extra import require_serve_packages
from lookonce.model.adapter_folder import open_adapters
from lookonce.model.kernels.openmp import set_openmp_spin_count
from lookonce.model.libraries.lean_transformers import import_lean_transformers
from lookonce.model.model_folder import ModelFolder, needs_torchvision
from lookonce.server.settings import TracingVariables
from lookonce.server.settings_parser import exit_with, parse_settings
from lookonce.tenants import load_tenants

# The name in health of the engine alone. Readiness also depends on the encoders; restarting helps only the engine.
ENGINE_PART = "lookonce.engine"


async def serve(arguments: list[str]) -> None:
    """Runs the service until SIGTERM. Raises StartupError when it must not start."""
    # Imported here, because `main` first checks that the packages of the extra `serve` are installed.
    from decoder_svc.rows.encoder_channel import watched_credentials, watched_token
    from decoder_svc.runner.parallel.rank_handshake import read_key
    from lookonce.devices.registry import check_device
    from lookonce.process.garbage import long_lived_objects
    from lookonce.process.heap import set_up_heap
    from lookonce.server import serving
    from lookonce.server.addresses import check_addresses
    from lookonce.server.admission.quotas import load_quotas
    from lookonce.server.telemetry import Telemetry
    from lookonce.store.early_checks import check_cache_settings
    from lookonce.store.health import watched_cache

    set_up_heap()
    settings = parse_settings(DecoderSettings, arguments, "decoder_svc")
    telemetry = Telemetry.from_settings(settings)
    tracing.start("lookonce-decoder", TracingVariables().exporters)
    quotas = load_quotas(settings, telemetry.registry)
    # Loading takes seconds to minutes: a process that must not start says so before it.
    ModelFolder.open(settings.model)
    open_adapters(settings.adapters)
    check_device(settings.device)
    serving.check_files(settings)
    check_addresses(settings)
    check_cache_settings(settings.redis_url, settings.seal_key_file)
    load_tenants(settings.tenant_secret_file)
    watched_credentials(settings.encoder_tls_ca, settings.encoder_tls_cert, settings.encoder_tls_key)
    watched_token(settings.encoder_token_file)
    if settings.rank_key_file is not None:
        read_key(settings.rank_key_file)
    # Meanwhile probes see that the process is alive.
    telemetry.start_endpoint()
    set_openmp_spin_count()
    # Imported here, because torch and transformers take seconds.
    with long_lived_objects():
        import_lean_transformers(
            needs_torchvision=needs_torchvision(settings.model), shows_progress=settings.log_format != "json"
        )
        from decoder_svc.service import open_service

    async with open_service(settings, telemetry.registry, quotas) as service, watched_cache(service.store) as parts:
        server = serving.GrpcService(
            settings,
            telemetry,
            [service.entry()],
            admin_services=[service.admin_entry()],
            quotas=quotas,
            is_ready=service.is_ready,
            has_died=lambda: service.engine.has_died,
            parts={**parts, ENGINE_PART: lambda: service.engine.is_healthy},
        )
        await server.serve_until_stopped()


def main() -> None:
    """Runs the service with the flags of the command line, and ends the process."""
    try:
        require_serve_packages("python -m decoder_svc")
    except ConfigurationError as error:
        exit_with(error)
    from lookonce.server import serving

    serving.run(serve(sys.argv[1:]))


if __name__ == "__main__":
    main()
