"""Records functions as CUDA graphs in one memory pool, and gives the pool up when a recording fails."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from decoder_svc.runner.graphs.decode_table import Decoded

# Warm-up runs on a side stream before a function is recorded: libraries initialise themselves in their first call, and
# that must not be recorded (CUDA semantics, "CUDA Graphs").
_NUM_WARM_UPS = 2


class GraphRecorder:
    """Records functions in one pool. After a failed recording it records nothing more: the pool is in a bad state."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self.has_failed = False

    def record(self, function: Callable[[], Decoded]) -> Callable[[], Decoded]:
        """Returns a function that replays `function`.

        Raises RuntimeError if `function` cannot be recorded, or if an earlier recording failed.
        """
        if self.has_failed:
            raise RuntimeError("an earlier recording failed")
        self._warm_up(function)
        try:
            return self._captured(function)
        except Exception:
            self.has_failed = True
            raise

    def _warm_up(self, function: Callable[[], Decoded]) -> None:
        """Runs `function` on a side stream. Raises RuntimeError if it makes the host wait for the device.

        Most failures are found here, before a recording has begun that could leave the allocator in a bad state.
        """
        current, beside = torch.cuda.current_stream(self._device), torch.cuda.Stream(self._device)
        beside.wait_stream(current)
        with torch.cuda.stream(beside):
            for number in range(_NUM_WARM_UPS):
                with _no_waiting() if number == _NUM_WARM_UPS - 1 else contextlib.nullcontext():
                    function()
        current.wait_stream(beside)

    def _captured(self, function: Callable[[], Decoded]) -> Callable[[], Decoded]:
        graph = torch.cuda.CUDAGraph()
        # If a recording fails, `torch.cuda.graph` leaves its own stream as the current one; this block restores ours.
        with torch.cuda.stream(torch.cuda.current_stream(self._device)):
            try:
                with torch.cuda.graph(graph, pool=self._pool):
                    output = function()
            except Exception:
                self._abandon_pool()
                raise

        def replay() -> Decoded:
            graph.replay()
            return output

        return replay

    def _abandon_pool(self) -> None:
        """Ends the allocator's redirection to the pool.

        A recording that fails in PyTorch 2.11 leaves the redirection behind (pytorch #180395). The allocator then waits
        for its end with all deferred frees, and emptying the cache is an error.
        """
        # Later versions have ended it, and raise here.
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self._device.index, self._pool)


@contextlib.contextmanager
def _no_waiting() -> Iterator[None]:
    """Makes operators raise for which the host would wait."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
