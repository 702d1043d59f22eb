"""The faults of a soak: processes that end, are killed or stop for a while, cut connections, and a cache that lies."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable, Sequence

import grpc.aio
import redis.asyncio

from benchmarks.soak_fleet import OPERATOR, Fleet
from benchmarks.soak_proxy import CuttingProxy
from lookonce.encoder.v1 import encoder_service_pb2 as pb
from lookonce.encoder.v1 import encoder_service_pb2_grpc as pb_grpc
from lookonce.local.child_process import ChildProcess

_STOPPED_REDIS_S = 2.0
_STOPPED_SERVICE_S = 1.0
_NUM_GARBLED = 20
_OPERATOR_TIMEOUT_S = 10.0


class Faults:
    """All faults by name. Those of `lasting` leave every process alive."""

    def __init__(self, fleet: Fleet, proxies: Sequence[CuttingProxy], rng: random.Random) -> None:
        self._fleet = fleet
        self._proxies = proxies
        self._rng = rng
        stack = fleet.stack
        self.lasting: dict[str, Callable[[], Awaitable[None]]] = {
            "Redis stops for 2 s": self._stop_redis,
            "Redis is emptied": self._flush,
            "entries become garbage": self._garble,
            "an operator evicts everything": self._evict,
            "connections of clients are cut": self._cut_clients,
            "connections to Redis are cut": self._cut_redis,
            "an encoder stops for 1 s": lambda: self._stop(stack.encoders),
            "a decoder stops for 1 s": lambda: self._stop(stack.decoders),
        }
        self.all: dict[str, Callable[[], Awaitable[None]]] = {
            **self.lasting,
            "Redis is killed": self._kill_redis,
            "an encoder is replaced": lambda: fleet.replace(stack.encoders[-1], kill=False),
            "an encoder is killed": lambda: fleet.replace(stack.encoders[-1], kill=True),
            "a decoder is replaced": lambda: fleet.replace(stack.decoders[-1], kill=False),
            "a decoder is killed": lambda: fleet.replace(stack.decoders[-1], kill=True),
        }

    async def _kill_redis(self) -> None:
        server = self._fleet.stack.redis
        assert server is not None, "the stack has a Redis of its own"
        os.kill(server.pid, signal.SIGKILL)
        await asyncio.to_thread(os.waitid, os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)
        await asyncio.sleep(self._rng.uniform(0, _STOPPED_REDIS_S))
        # In this thread: the server ends with the thread that starts it.
        server.start()

    async def _stop_redis(self) -> None:
        server = self._fleet.stack.redis
        assert server is not None, "the stack has a Redis of its own"
        await _stop(server.pid, _STOPPED_REDIS_S)

    async def _stop(self, processes: Sequence[ChildProcess]) -> None:
        await _stop(self._rng.choice(processes).pid, _STOPPED_SERVICE_S)

    async def _flush(self) -> None:
        async with self._redis() as server:
            await server.flushall()

    async def _garble(self) -> None:
        """Overwrites entries, some as a whole and some in part."""
        async with self._redis() as server:
            keys = [key async for key in server.scan_iter("lookonce:*", _type="string")]
            for key in self._rng.sample(keys, min(_NUM_GARBLED, len(keys))):
                noise = self._rng.randbytes(self._rng.randint(1, 5000))
                if self._rng.random() < 0.5:
                    await server.set(key, noise, keepttl=True)
                else:
                    await server.setrange(key, self._rng.randrange(5000), noise)

    async def _cut_redis(self) -> None:
        async with self._redis() as server:
            await server.client_kill_filter(_type="normal", skipme=True)
            await server.client_kill_filter(_type="pubsub")

    async def _cut_clients(self) -> None:
        for proxy in self._proxies:
            proxy.cut()

    async def _evict(self) -> None:
        target = self._fleet.stack.encoders[0].ready.admin_target
        assert target is not None
        metadata = (("authorization", f"Bearer {self._fleet.tokens[OPERATOR]}"),)
        async with grpc.aio.insecure_channel(target) as channel:
            stub: pb_grpc.EncoderAdminServiceAsyncStub = pb_grpc.EncoderAdminServiceStub(channel)
            request = pb.EvictEmbeddingsRequest(all=True)
            await stub.EvictEmbeddings(request, metadata=metadata, timeout=_OPERATOR_TIMEOUT_S)

    def _redis(self) -> redis.asyncio.Redis:
        url = self._fleet.stack.redis_url
        assert url is not None
        return redis.asyncio.Redis.from_url(url, socket_timeout=_OPERATOR_TIMEOUT_S)


async def _stop(pid: int, seconds: float) -> None:
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        os.kill(pid, signal.SIGCONT)
