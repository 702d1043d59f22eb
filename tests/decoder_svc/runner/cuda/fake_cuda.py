"""A fake of the parts of `torch.cuda` that our runner calls: streams that do nothing, graphs that repeat operators."""

from __future__ import annotations

import contextlib
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import ClassVar

import pytest
import torch

from decoder_svc.runner.cuda.runner import GPUModelRunner
from decoder_svc.runner.host_transfer import PinnedTransfer
from tests.decoder_svc.runner.operator_tape import OperatorTape
from tests.decoder_svc.runner.tensor_backend import TensorBackend

FREE_BYTES, ALLOCATED_BYTES, PEAK_BYTES, GRAPH_BYTES = 1 << 30, 1 << 20, 5 << 20, 3 << 20
NUM_PROCESSORS = 7


class FakeGraph:
    """Replaces `torch.cuda.CUDAGraph` by an operator tape."""

    tape: OperatorTape
    # Graphs that hold memory.
    alive: ClassVar[weakref.WeakSet[FakeGraph]] = weakref.WeakSet()

    def replay(self) -> None:
        """Runs the recorded operators again."""
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


class FakeGPURunner(GPUModelRunner):
    """The CUDA runner with its tensors on the CPU."""

    def _cache_device_properties(self) -> None:
        super()._cache_device_properties()
        self.device = torch.device("cpu")
        self.transfer = PinnedTransfer(self.device)


class FakeTriton(TensorBackend):
    """Replaces the kernel where Triton does not run."""

    name = "triton"

    def __init__(self, num_processors: int) -> None:
        super().__init__()
        self.num_processors = num_processors


def install(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Installs the fake for one test; returns a list that collects the memory pools of recorded graphs."""
    pools: list[object] = []
    FakeStream.current = FakeStream.steps = FakeStream()

    @contextlib.contextmanager
    def inside(stream: FakeStream) -> Iterator[None]:
        outer, FakeStream.current = FakeStream.current, stream
        yield
        FakeStream.current = outer

    @contextlib.contextmanager
    def graph(recorded: FakeGraph, pool: object) -> Iterator[None]:
        pools.append(pool)
        recorded.tape = OperatorTape()
        FakeGraph.alive.add(recorded)
        with recorded.tape:
            yield

    def free() -> tuple[int, int]:
        """Returns less free memory while graphs exist."""
        return (FREE_BYTES - (GRAPH_BYTES if FakeGraph.alive else 0), 2 * FREE_BYTES)

    properties = types.SimpleNamespace(name="a device", major=9, minor=0, multi_processor_count=NUM_PROCESSORS)
    replaced: dict[str, Callable[..., object]] = {
        "CUDAGraph": FakeGraph,
        "Stream": FakeStream,
        "current_stream": lambda _device=None: FakeStream.current,
        "empty_cache": lambda: None,
        "get_device_properties": lambda _device: properties,
        "graph": graph,
        "graph_pool_handle": object,
        "max_memory_allocated": lambda _device: PEAK_BYTES,
        "mem_get_info": lambda _device: free(),
        "memory_allocated": lambda _device: ALLOCATED_BYTES,
        "reset_peak_memory_stats": lambda _device: None,
        "stream": inside,
        "synchronize": lambda _device: None,
    }
    for name, replacement in replaced.items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: stream.recorded.add(self.data_ptr()))
    module = types.SimpleNamespace(TritonBackend=FakeTriton)
    monkeypatch.setitem(sys.modules, "decoder_svc.runner.cuda.triton_attention", module)
    return pools
