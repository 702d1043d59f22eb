"""`python -m encoder_svc`: settings → model → pipeline → gRPC server, until SIGTERM."""

from __future__ import annotations

import sys

from lookonce import tracing
from lookonce.errors import ConfigurationError
from lookonce.local.serve_extra import require_serve_packages
from lookonce.model.kernels.openmp import set_openmp_spin_count
from lookonce.model.libraries.lean_transformers import import_lean_transformers
from lookonce.model.model_folder import ModelFolder, needs_torchvision
from lookonce.server.settings import TracingVariables
from lookonce.server.settings_parser import exit_with, parse_settings
from lookonce.tenants import load_tenants


async def serve(arguments: list[str]) -> None:
    """Runs the service. Raises StartupError when it must not start."""
    # Imported here, because `main` first checks that the packages of the extra `serve` are installed.
    from encoder_svc.settings import EncoderSettings
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
    settings = parse_settings(EncoderSettings, arguments, "encoder_svc")
    tenants = load_tenants(settings.tenant_secret_file)
    telemetry = Telemetry.from_settings(settings)
    tracing.start("lookonce-encoder", TracingVariables().exporters)
    quotas = load_quotas(settings, telemetry.registry)
    # Loading takes seconds to minutes: a process that must not start says so before it.
    ModelFolder.open(settings.model)
    check_device(settings.device)
    serving.check_files(settings)
    check_addresses(settings)
    check_cache_settings(settings.redis_url, settings.seal_key_file)
    # Meanwhile probes see that the process is alive.
    telemetry.start_endpoint()
    set_openmp_spin_count()
    # Imported here, because these take seconds.
    with long_lived_objects():
        import_lean_transformers(
            needs_torchvision=needs_torchvision(settings.model), shows_progress=settings.log_format != "json"
        )
        import torch

        from encoder_svc.service import admin_entry, open_control, open_pipeline, service_entry
        from encoder_svc.vision.vision_model import VisionModel

    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)
    model = VisionModel.load_warm(settings.vision)
    async with (
        open_pipeline(settings, model, telemetry.registry) as pipeline,
        open_control(settings, pipeline) as control,
        watched_cache(pipeline.tiers.store) as parts,
    ):
        server = serving.GrpcService(
            settings,
            telemetry,
            [service_entry(pipeline, tenants, quotas, settings)],
            admin_services=[admin_entry(pipeline, tenants, control)],
            quotas=quotas,
            is_ready=lambda: pipeline.is_healthy,
            has_died=lambda: pipeline.has_died,
            parts=parts,
        )
        await server.serve_until_stopped()


def main() -> None:
    """Runs the service until it is stopped, and ends the process with its exit code."""
    try:
        require_serve_packages("python -m encoder_svc")
    except ConfigurationError as error:
        exit_with(error)
    from lookonce.server import serving

    serving.run(serve(sys.argv[1:]))


if __name__ == "__main__":
    main()
