"""A fake of the parts of `torch.cuda` that our runner calls: streams that do nothing, graphs that repeat operators.

Tensors are those of the simulated device, which computes on the CPU.
"""

from __future__ import annotations

import contextlib
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from decoder_svc.runner.cuda import graph_recorder
from tests.decoder_svc.runner.cuda import simulated_device
from tests.decoder_svc.runner.cuda.simulated_device import SimulatedDevice, SimulatedKernel
from tests.decoder_svc.runner.operator_tape import OperatorTape
from tests.decoder_svc.runner.tensor_backend import TensorBackend

FREE_BYTES, ALLOCATED_BYTES, PEAK_BYTES = 1 << 30, 1 << 20, 5 << 20
# Memory that all graphs share, and that each takes besides.
GRAPH_BYTES, NODES_BYTES = 3 << 20, 1 << 20
NUM_PROCESSORS = 7


class FakeGraph:
    """Replaces `torch.cuda.CUDAGraph` by an operator tape."""

    tape: OperatorTape
    num_replays: ClassVar[int] = 0
    # Graphs that hold memory.
    alive: ClassVar[weakref.WeakSet[FakeGraph]] = weakref.WeakSet()

    def replay(self) -> None:
        """Runs the recorded operators again."""
        FakeGraph.num_replays += 1
        self.tape.play()


class FakeStream:
    """Replaces `torch.cuda.Stream`; all work runs in one order here."""

    # The stream that work is submitted to; the steps' stream outside of `torch.cuda.stream` blocks.
    current: ClassVar[FakeStream]
    steps: ClassVar[FakeStream]

    def __init__(self, _device: object = None) -> None:
        self.num_waits = 0
        # Addresses of tensors that were passed to `record_stream`.
        self.recorded: set[int] = set()

    def wait_stream(self, _other: FakeStream) -> None:
        """Counts the call; there is nothing to wait for."""
        self.num_waits += 1


class FakeEvent:
    """Replaces `torch.cuda.Event`; knows the copies that had begun when it was recorded."""

    device: ClassVar[SimulatedDevice]

    def __init__(self) -> None:
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def record(self, _stream: FakeStream) -> None:
        """Notes the copies that have begun."""
        self._copies = self.device.returning

    def synchronize(self) -> None:
        """Waits for the copies that had begun when the event was recorded."""
        self.device.wait(self._copies)


class FakeTriton(TensorBackend):
    """Replaces the kernel where Triton does not run."""

    name = "triton"

    def __init__(self, num_processors: int, _shared_bytes: int) -> None:
        super().__init__()
        self.num_processors = num_processors


@dataclass(frozen=True, slots=True)
class FakeCuda:
    """The fake of one test."""

    device: SimulatedDevice
    # Memory pools of recorded graphs, in order.
    pools: list[object]


@contextlib.contextmanager
def installed(*kernel_modules: types.ModuleType) -> Iterator[FakeCuda]:
    """Replaces CUDA inside the block.

    `kernel_modules` have Triton kernels, which then run in Triton's interpreter. Without them, attention is computed by
    operators of PyTorch.
    """
    with pytest.MonkeyPatch.context() as monkeypatch:
        device = simulated_device.activate(monkeypatch)
        pools = _install(monkeypatch, device)
        # No library of the fake initialises itself, so the last warm-up, in which waiting raises, is enough.
        monkeypatch.setattr(graph_recorder, "_NUM_WARM_UPS", 1)
        for module in kernel_modules:
            for name, function in list(vars(module).items()):
                if type(function).__name__ == "InterpretedFunction":
                    monkeypatch.setattr(module, name, SimulatedKernel(function, device))
        if not kernel_modules:
            without_triton = types.SimpleNamespace(TritonBackend=FakeTriton)
            monkeypatch.setitem(sys.modules, "decoder_svc.runner.cuda.triton_attention", without_triton)
            # None makes the import fail, as without Triton.
            for name in ("fused_stack", "triton_penalties", "triton_quantized", "triton_recurrent"):
                monkeypatch.setitem(sys.modules, f"decoder_svc.runner.cuda.{name}", None)
        with device:
            yield FakeCuda(device, pools)


class FakeAllocator:
    """The allocator's part in recordings: it is redirected to a graph's pool until the recording ends."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        # Pools of all recordings, of those that did not end, and of those that failed.
        self.pools: list[object] = []
        self._redirected: list[object] = []
        self._spoilt: list[object] = []

    @contextlib.contextmanager
    def graph(self, recorded: FakeGraph, pool: object) -> Iterator[None]:
        """Leaves its stream and the redirection behind if the recording fails, like PyTorch 2.11."""
        assert pool not in self._spoilt, "the pool of a failed recording is used again"
        self.pools.append(pool)
        recorded.tape = OperatorTape()
        self._redirected.append(pool)
        outer, FakeStream.current = FakeStream.current, FakeStream()
        try:
            with self._device.recording(recorded.tape):
                yield
        except BaseException:
            self._spoilt.append(pool)
            raise
        FakeGraph.alive.add(recorded)
        FakeStream.current = outer
        self._redirected.remove(pool)

    def end_redirection(self, _device: int, pool: object) -> None:
        """Ends what a failed recording left. Raises RuntimeError if there is nothing to end."""
        if pool not in self._redirected:
            raise RuntimeError("not currently recording to this pool")
        self._redirected.remove(pool)

    def empty_cache(self) -> None:
        """Fails while the allocator is redirected."""
        assert not self._redirected, "the allocator is still redirected to a pool"


def _install(monkeypatch: pytest.MonkeyPatch, device: SimulatedDevice) -> list[object]:
    allocator = FakeAllocator(device)
    # Runners of earlier tests may not have been collected yet.
    FakeGraph.alive.clear()
    FakeStream.current = FakeStream.steps = FakeStream()
    FakeEvent.device = device

    @contextlib.contextmanager
    def inside(stream: FakeStream) -> Iterator[None]:
        outer, FakeStream.current = FakeStream.current, stream
        try:
            yield
        finally:
            FakeStream.current = outer

    def free() -> tuple[int, int]:
        """Returns less free memory while graphs exist."""
        num_graphs = len(FakeGraph.alive)
        return (FREE_BYTES - (GRAPH_BYTES + NODES_BYTES * num_graphs if num_graphs else 0), 2 * FREE_BYTES)

    properties = types.SimpleNamespace(
        name="a device",
        major=9,
        minor=0,
        multi_processor_count=NUM_PROCESSORS,
        shared_memory_per_block_optin=227 << 10,
    )
    replaced: dict[str, Callable[..., object]] = {
        "CUDAGraph": FakeGraph,
        "Event": FakeEvent,
        "Stream": FakeStream,
        "current_stream": lambda _device=None: FakeStream.current,
        "empty_cache": allocator.empty_cache,
        "get_sync_debug_mode": lambda: 2 if device.refuses_waiting else 0,
        "get_device_properties": lambda _device: properties,
        "graph": allocator.graph,
        "graph_pool_handle": object,
        "max_memory_allocated": lambda _device: PEAK_BYTES,
        "mem_get_info": lambda _device: free(),
        "memory_allocated": lambda _device: ALLOCATED_BYTES,
        "reset_peak_memory_stats": lambda _device: None,
        "set_sync_debug_mode": device.set_sync_debug_mode,
        "stream": inside,
        "synchronize": lambda _device: None,
    }
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", allocator.end_redirection, raising=False)
    for name, replacement in replaced.items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: stream.recorded.add(self.data_ptr()))
    return allocator.pools
