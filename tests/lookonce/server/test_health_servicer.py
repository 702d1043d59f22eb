"""Watches of the health get each status in the end, and leave nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from grpc_health.v1 import health_pb2

from lookonce.server.health_servicer import HealthServicer
from tests.lookonce.server.running_server import running_server, until

Health = health_pb2.HealthCheckResponse


def watch_of(servicer: HealthServicer, name: str) -> AsyncGenerator[Any]:
    return servicer.Watch(health_pb2.HealthCheckRequest(service=name), None)


def num_watches(servicer: HealthServicer) -> int:
    return sum(len(watches) for watches in servicer._watches.values())


async def test_a_watch_that_misses_statuses_gets_the_latest_one_and_no_status_twice() -> None:
    servicer = HealthServicer()
    servicer.set("a", is_serving=False)
    watch = watch_of(servicer, "a")
    assert (await anext(watch)).status == Health.NOT_SERVING
    for is_serving in (True, False, True):
        servicer.set("a", is_serving=is_serving)
    assert (await anext(watch)).status == Health.SERVING
    following = asyncio.create_task(anext(watch))
    for is_serving in (False, True):
        servicer.set("a", is_serving=is_serving)
    await asyncio.sleep(0.01)
    assert not following.done(), "the status is the one that the client has"
    servicer.begin_drain()
    assert (await following).status == Health.NOT_SERVING


async def test_a_drain_is_final() -> None:
    servicer = HealthServicer()
    servicer.set("a", is_serving=True)
    servicer.begin_drain()
    servicer.set("a", is_serving=True)
    assert (await anext(watch_of(servicer, "a"))).status == Health.NOT_SERVING


async def test_a_watch_of_an_unknown_name_learns_of_its_first_status() -> None:
    servicer = HealthServicer()
    watch = watch_of(servicer, "later")
    assert (await anext(watch)).status == Health.SERVICE_UNKNOWN
    servicer.set("later", is_serving=True)
    assert (await anext(watch)).status == Health.SERVING


async def test_a_watch_whose_client_has_gone_ends() -> None:
    async with running_server() as running:
        servicer = running.service._health
        watches = [running.health.Watch(health_pb2.HealthCheckRequest(service=name)) for name in ("", "", "no")]
        for watch in watches:
            await watch.read()
        assert num_watches(servicer) == 3
        for number, watch in enumerate(watches, 1):
            watch.cancel()

            async def is_forgotten(left: int = 3 - number) -> bool:
                return num_watches(servicer) == left

            await until(is_forgotten)


def test_every_method_of_the_service_is_served() -> None:
    """A later version of the library may have more."""
    methods = health_pb2.DESCRIPTOR.services_by_name["Health"].methods
    assert {method.name for method in methods} <= set(vars(HealthServicer))
