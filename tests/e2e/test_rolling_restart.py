"""Decoders and encoders are replaced under load, each at its address: no call fails. Half-way, Redis dies.

In test_revision_roll.py, all of a fleet are replaced, by others with the next model revision.

The load is a mixture that two cores carry while processes start: mostly cheap calls (Tokenize, GetLoad, lookups of an
image), beside them short answers about text and about pictures, known and new ones. When a decoder is told to end,
streams run that outlast what it still accepts. A failed call counts as failed: nothing is tried again but what the SDK
and its channels try by themselves.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc.aio
import psutil
import pytest

from demo.scenes import png_bytes, random_scene
from lookonce.aio import AsyncClient
from lookonce.decoder.v1 import decoder_service_pb2 as pb
from lookonce.decoder.v1 import decoder_service_pb2_grpc as pb_grpc
from lookonce.images import ImageRef
from lookonce.local.child_process import ChildProcess
from lookonce.local.local_stack import LocalStack
from lookonce.sdk.connection.channel import DECODER, channel_options
from tests.conftest import DEMO_MODEL, ONE_THREAD
from tests.decoder_svc.decoders import chat
from tests.e2e.pictures import QUESTION, Picture, fresh
from tests.lookonce.store.faults import kill_child

# For each process that is replaced. Each step begins with them at full speed, which outlasts a drain.
NUM_CALLS = 250
SLOWDOWN = 5
# More than clients need to hear of NOT_SERVING, also on a busy machine: with 1 s, one call of thousands was refused.
DRAIN = ("--drain-delay-s", "3", "--drain-timeout-s", "60")
FLAGS = (*ONE_THREAD, *DRAIN)
# On a channel of their own, so that round robin gives two of them to each decoder.
NUM_STREAMS = 4
# Nearly all that the model's context takes.
STREAM_TOKENS = 1900
# The SDK's two, and those of the two stubs.
NUM_DECODER_CHANNELS = 4
CALL_TIMEOUT_S = 60.0
STEP_TIMEOUT_S = 100.0
_seeds = itertools.count(88_000_000)


class Traffic:
    """Loops of calls, and counts of how they ended."""

    def __init__(self) -> None:
        # Calls that have ended, by kind, failed ones too.
        self.ended: Counter[str] = Counter()
        self.failures: list[str] = []
        # After so many calls the loops make longer pauses: a slow machine would else be slowed down by them alone.
        self.num_dense = 0
        self._is_over = False

    async def count(self, kind: str, call: Awaitable[None]) -> None:
        """Awaits one call and counts it, with its error if it fails."""
        try:
            await call
        except Exception as error:
            self.failures.append(f"{kind}: {error!r}")
        self.ended[kind] += 1

    async def repeat(self, kind: str, call: Callable[[], Awaitable[None]], pause_s: float) -> None:
        """One call after the other until `stop`."""
        while not self._is_over:
            await self.count(kind, call())
            await asyncio.sleep(pause_s if self.ended.total() < self.num_dense else SLOWDOWN * pause_s)

    def stop(self) -> None:
        """Ends the loops; calls in flight are not cancelled."""
        self._is_over = True


class Clients:
    """The SDK, and stubs on channels as the SDK makes them for what the SDK has no method for."""

    def __init__(
        self,
        client: AsyncClient,
        stub: pb_grpc.DecoderServiceAsyncStub,
        streaming: pb_grpc.DecoderServiceAsyncStub,
        pictures: list[Picture],
    ) -> None:
        self._client = client
        self._stub = stub
        self._streaming = streaming
        self._pictures = itertools.cycle(pictures)
        self._known = ImageRef.from_bytes(pictures[0].data)

    async def tokenize(self) -> None:
        response = await self._stub.Tokenize(pb.TokenizeRequest(chat=chat("Where is it?")), timeout=CALL_TIMEOUT_S)
        assert response.token_ids

    async def load(self) -> None:
        await self._stub.GetLoad(pb.GetLoadRequest(), timeout=CALL_TIMEOUT_S)

    async def lookup(self) -> None:
        await self._client.lookup([self._known])

    async def text(self) -> None:
        answer = await self._client.generate("Where is it?", max_tokens=2, temperature=0.0)
        assert answer.usage.completion_tokens > 0

    async def known_picture(self) -> None:
        picture = next(self._pictures)
        answer = await self._client.generate(QUESTION, images=[picture.data], max_tokens=16)
        assert answer.text == picture.answer

    async def new_picture(self) -> None:
        data = png_bytes(random_scene(next(_seeds), 1))
        answer = await self._client.generate(QUESTION, images=[data], max_tokens=4)
        assert answer.usage.encoded_image_tokens == answer.usage.image_tokens > 0

    async def stream(self, has_begun: Callable[[], None]) -> None:
        await read_stream(self._streaming, has_begun)


async def read_stream(stub: pb_grpc.DecoderServiceAsyncStub, has_begun: Callable[[], None]) -> None:
    sampling = pb.SamplingParams(max_tokens=STREAM_TOKENS, ignore_eos=True, temperature=0.0)
    params = pb.GenerateParams(chat=chat("Where is it?"), sampling=sampling)
    events = stub.GenerateStream(pb.GenerateStreamRequest(params=params), timeout=CALL_TIMEOUT_S)
    num_tokens, reason = 0, pb.FINISH_REASON_UNSPECIFIED
    async for event in events:
        if event.HasField("started"):
            has_begun()
        elif event.HasField("delta"):
            assert event.delta.token_index == num_tokens, "a gap or a repetition"
            num_tokens += len(event.delta.token_ids)
        else:
            reason = event.finished.finish_reason
    assert (num_tokens, reason) == (STREAM_TOKENS, pb.FINISH_REASON_LENGTH)


async def read_until_refused(decoder: ChildProcess, traffic: Traffic) -> None:
    """Reads streams of one decoder, one after the other, until it refuses one: the one before may run meanwhile."""
    async with grpc.aio.insecure_channel(decoder.ready.target) as channel:
        stub = pb_grpc.DecoderServiceStub(channel)
        while True:
            begun = asyncio.Event()
            try:
                await read_stream(stub, begun.set)
            except grpc.aio.AioRpcError as error:
                if begun.is_set() or error.code() is not grpc.StatusCode.UNAVAILABLE:
                    traffic.failures.append(f"stream until refused: {error!r}")
                return
            traffic.ended["stream until refused"] += 1


@asynccontextmanager
async def clients_of(stack: LocalStack) -> AsyncIterator[Clients]:
    decoders, encoders = (f"ipv4:{','.join(targets)}" for targets in (stack.decoder_targets, stack.encoder_targets))
    options = [*channel_options(DECODER, target=decoders), ("grpc.use_local_subchannel_pool", 1)]
    async with (
        AsyncClient.connect(decoders, encoders, max_retries=0) as client,
        grpc.aio.insecure_channel(decoders, options=options) as channel,
        grpc.aio.insecure_channel(decoders, options=options) as streaming,
    ):
        pictures = await asyncio.to_thread(fresh, 6)
        await client.model_info()
        # Opens the channels to single decoders.
        await client.generate("hello", max_tokens=1)
        channel.get_state(try_to_connect=True)
        streaming.get_state(try_to_connect=True)
        await until(lambda: all(is_used(decoder) for decoder in stack.decoders))
        yield Clients(client, pb_grpc.DecoderServiceStub(channel), pb_grpc.DecoderServiceStub(streaming), pictures)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(STEP_TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.05)


def num_connections(client: psutil.Process, server: ChildProcess) -> int:
    port = int(server.ready.target.rpartition(":")[2])
    connections = client.net_connections("tcp")
    return sum(one.status == psutil.CONN_ESTABLISHED and one.raddr.port == port for one in connections)


def is_used(decoder: ChildProcess) -> bool:
    """Whether all channels of this process have a connection to it."""
    return num_connections(psutil.Process(), decoder) >= NUM_DECODER_CHANNELS


async def replace(stack: LocalStack, process: ChildProcess) -> int:
    """One step of a roll-out: it is over when everybody is connected to the new process.

    Returns how many calls the old one had in progress when it began to refuse new ones.
    """
    process.terminate()
    await until(lambda: process.returncode is not None)
    log = process.log_path.read_text()
    assert process.returncode == 0, log[-3000:]
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    (refusing,) = [line for line in lines if line["event"] == "refusing new calls"]
    assert [line["expelled_calls"] for line in lines if line["event"] == "stopped"] == [0]
    new = stack.restart(process)
    await until(new.is_ready)
    if new in stack.decoders:
        await until(lambda: is_used(new))
        return int(refusing["calls"])
    callers = [psutil.Process(), *(psutil.Process(decoder.pid) for decoder in stack.decoders)]
    await until(lambda: all(num_connections(caller, new) for caller in callers))
    return int(refusing["calls"])


async def replace_one_of_each(stack: LocalStack, index: int, clients: Clients, traffic: Traffic) -> int:
    """A decoder, told to end while streams run on both, and then an encoder.

    Returns how many calls the decoder had in progress when it began to refuse new ones.
    """
    traffic.num_dense = traffic.ended.total() + NUM_CALLS
    async with asyncio.TaskGroup() as group:
        begun = asyncio.Semaphore(0)
        for _ in range(NUM_STREAMS):
            group.create_task(traffic.count("stream", clients.stream(begun.release)))
        for _ in range(NUM_STREAMS):
            await asyncio.wait_for(begun.acquire(), STEP_TIMEOUT_S)
        # Two of them, so that one runs when the other one is refused.
        for _ in range(2):
            group.create_task(read_until_refused(stack.decoders[index], traffic))
        num_writing = await replace(stack, stack.decoders[index])
    traffic.num_dense = traffic.ended.total() + NUM_CALLS
    await replace(stack, stack.encoders[index])
    return num_writing


# It starts eight processes beside its load: a busy machine takes its time for that.
@pytest.mark.timeout(400)
async def test_no_call_fails_and_every_stream_ends_while_processes_are_replaced() -> None:
    with LocalStack(
        DEMO_MODEL, num_encoders=2, num_decoders=2, encoder_arguments=FLAGS, decoder_arguments=FLAGS
    ) as stack:
        assert stack.redis is not None
        traffic = Traffic()
        async with clients_of(stack) as clients, asyncio.TaskGroup() as group:
            # Kind, loops, seconds between two calls of a loop.
            loops: list[tuple[str, Callable[[], Awaitable[None]], int, float]] = [
                ("Tokenize", clients.tokenize, 2, 0.06),
                ("GetLoad", clients.load, 2, 0.06),
                ("lookup", clients.lookup, 2, 0.06),
                ("text", clients.text, 1, 0.2),
                ("known picture", clients.known_picture, 1, 0.4),
                ("new picture", clients.new_picture, 1, 0.8),
            ]
            for kind, call, num_loops, pause_s in loops:
                for _ in range(num_loops):
                    group.create_task(traffic.repeat(kind, call, pause_s))
            num_writing = [await replace_one_of_each(stack, 0, clients, traffic)]
            kill_child(stack.redis.pid)
            num_writing.append(await replace_one_of_each(stack, 1, clients, traffic))
            await until(lambda: traffic.ended.total() >= 4 * NUM_CALLS)
            traffic.stop()
        print(f"calls that ended: {dict(traffic.ended)}")
        assert any(num_writing), "the streams that the decoders were writing"
        assert not traffic.failures, f"{len(traffic.failures)} failed, such as {traffic.failures[:5]}"
        assert traffic.ended["stream"] == 2 * NUM_STREAMS
