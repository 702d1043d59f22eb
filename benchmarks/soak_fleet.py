"""The fleet of a soak: encoders, decoders and Redis in processes, with tokens of three tenants, and its memory."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil

from lookonce.local.child_process import ChildProcess
from lookonce.local.local_stack import LocalStack
from lookonce.local.token_entry import new_token

MODEL = pathlib.Path(__file__).parents[1] / "models/demo"
CONTROL, WORKING, ABUSER, OPERATOR = "control", "working", "abuser", "operator"
_DECODER = "decoder"
_START_TIMEOUT_S = 120.0
# Full after a minute, so that a decoder's memory does not grow with its use. By default it would be 512 MiB.
_KV_BYTES = 64 << 20
_QUOTAS = f"""
[tenants.{ABUSER}]
max_in_flight = 8
requests_per_s = 20
image_bytes_per_s = 20000000
image_pixels_per_s = 100000000
"""


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of one process, as the kernel counts it."""

    name: str
    pid: int
    rss_bytes: int
    pss_bytes: int


class Fleet:
    """A running stack. The first encoder and the first decoder live through the whole soak; others are replaced."""

    def __init__(self, stack: LocalStack, tokens: dict[str, str]) -> None:
        self.stack = stack
        # By tenant, and of the operator.
        self.tokens = tokens
        # Names of processes that ended without having been told to.
        self.ended_by_themselves: list[str] = []
        self._num_past_encodes = 0

    def note_ended(self) -> None:
        """Notes the lasting processes that have ended."""
        for process in (self.stack.encoders[0], self.stack.decoders[0]):
            if process.returncode is not None and process.name not in self.ended_by_themselves:
                print(f"{process.name} ended with {process.returncode}:\n{process.log_tail()}", flush=True)
                self.ended_by_themselves.append(process.name)

    async def num_encodes(self) -> int:
        """Encodes of all encoders, those of processes that have been replaced included."""
        return self._num_past_encodes + await self._num_encodes_of(*self.stack.encoders)

    async def replace(self, process: ChildProcess, *, kill: bool) -> None:
        """Ends a process, starts it again at its address, and returns when it is ready."""
        if process in self.stack.encoders:
            self._num_past_encodes += await self._num_encodes_of(process)
        if kill:
            psutil.Process(process.pid).kill()
        process.terminate()
        await self._until(lambda: process.returncode is not None)
        await self._until(self.stack.restart(process).is_ready)

    def memory(self) -> list[Memory]:
        """Memory of each process now."""
        assert self.stack.redis is not None, "the stack has a Redis of its own"
        pids = {one.name: one.pid for one in (*self.stack.encoders, *self.stack.decoders)}
        found = []
        for name, pid in {**pids, "redis": self.stack.redis.pid}.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                used = psutil.Process(pid).memory_full_info()
                found.append(Memory(name, pid, used.rss, getattr(used, "pss", used.rss)))
        return found

    async def _num_encodes_of(self, *processes: ChildProcess) -> int:
        name = "lookonce_encoder_encodes_total"
        try:
            return int(await asyncio.to_thread(self.stack.metric, processes, name))
        except OSError:
            return 0

    async def _until(self, condition: Callable[[], bool]) -> None:
        give_up_s = time.monotonic() + _START_TIMEOUT_S
        while not condition():
            if time.monotonic() > give_up_s:
                raise TimeoutError("a process neither ended nor started in time")
            await asyncio.sleep(0.05)


@contextlib.contextmanager
def running_fleet(num_each: int) -> Iterator[Fleet]:
    """Runs `num_each` encoders and as many decoders, behind tokens."""
    tokens, entries = {}, []
    for name, tenant, role in [
        *((tenant, tenant, "client") for tenant in (CONTROL, WORKING, ABUSER)),
        (OPERATOR, "", "operator"),
        (_DECODER, "", "service"),
    ]:
        tokens[name], entry = new_token(name, tenant, role)
        entries.append(entry)
    with tempfile.TemporaryDirectory(prefix="lookonce-soak-") as made:
        folder = pathlib.Path(made)
        (folder / "tokens.toml").write_text("".join(entries))
        (folder / "quotas.toml").write_text(_QUOTAS)
        (folder / "decoder.token").write_text(tokens[_DECODER])
        shared = ["--num-threads", "1", "--auth-tokens-file", str(folder / "tokens.toml")]
        shared += ["--quotas-file", str(folder / "quotas.toml")]
        to_encoder = ["--encoder-token-file", str(folder / "decoder.token")]
        with LocalStack(
            MODEL,
            num_encoders=num_each,
            num_decoders=num_each,
            encoder_arguments=shared,
            decoder_arguments=[*shared, *to_encoder, "--kv-cache-memory-bytes", str(_KV_BYTES)],
        ) as stack:
            yield Fleet(stack, tokens)
