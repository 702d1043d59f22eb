"""The metrics show whether the server is serving and how long it has been draining."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from lookonce.server.metrics import ServingMetrics
from lookonce.server.serving import GrpcService
from lookonce.server.settings import ServiceSettings
from lookonce.server.telemetry import Telemetry


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.02)


async def test_the_metric_follows_readiness_and_the_drain() -> None:
    ready = False
    telemetry = Telemetry()
    settings = ServiceSettings.model_validate({"model": ".", "drain_delay_s": 0.25, "drain_timeout_s": 0.5})
    service = GrpcService(settings, telemetry, [], is_ready=lambda: ready)

    def value(name: str) -> float:
        found = telemetry.registry.get_sample_value(name)
        assert found is not None
        return found

    await service.start()
    assert (value("lookonce_serving"), value("lookonce_drain_seconds")) == (0, 0)
    assert value("lookonce_drain_limit_seconds") == 0.75
    ready = True
    await until(lambda: value("lookonce_serving") == 1)
    ready = False
    await until(lambda: value("lookonce_serving") == 0)
    ready = True
    await until(lambda: value("lookonce_serving") == 1)
    stopping = asyncio.create_task(service.stop())
    await until(lambda: value("lookonce_drain_seconds") > 0)
    assert value("lookonce_serving") == 0
    await stopping


def test_a_drain_ages() -> None:
    registry = CollectorRegistry()
    now_s = 100.0
    metrics = ServingMetrics(registry, 30.0, clock=lambda: now_s)
    metrics.report(is_serving=True)
    now_s = 107.0
    assert registry.get_sample_value("lookonce_drain_seconds") == 0
    metrics.begin_drain()
    assert registry.get_sample_value("lookonce_serving") == 0
    now_s = 109.5
    assert registry.get_sample_value("lookonce_drain_seconds") == 2.5
