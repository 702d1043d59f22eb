"""A runner with graphs that works on any machine; its graphs are those of `operator_tape.py`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from decoder_svc.runner.attention import PAGED_ATTENTION
from decoder_svc.runner.base import ModelRunnerBase
from decoder_svc.runner.graphs.decode_table import Decoded
from decoder_svc.runner.worst_case import WorstCase
from lookonce.model.half_model import load_text_half
from tests.decoder_svc.runner.operator_tape import OperatorTape
from tests.decoder_svc.runner.tensor_backend import TensorBackend

FREE_BYTES = 1 << 30


class RecordingRunner(ModelRunnerBase):
    """Overrides the four methods that a device must, and nothing else."""

    # False: passes are computed at once instead of being recorded.
    records = True
    # Numbers of rows of logits of the graphs, in the order of their recording, and of the replays.
    recorded: list[int]
    replayed: list[int]

    def _cache_device_properties(self) -> None:
        self.device = torch.device("cpu")
        self.tokenwise_graph_batch_sizes = (1, 2, 4, 8)
        self.chunk_graph_sizes = (16, 32, 64)
        self.recorded, self.replayed = [], []

    def load_model(self) -> None:
        self.model = load_text_half(self.config.folder, self.config.dtype, PAGED_ATTENTION)
        self.backend = TensorBackend()

    def profile_run(self, worst: WorstCase) -> int:
        self._dummy_run(worst)
        return FREE_BYTES

    def capture_model(self) -> None:
        self._capture_graphs(self._record)

    def _record(self, function: Callable[[], Decoded]) -> Callable[[], Decoded]:
        if not self.records:
            return function
        with OperatorTape() as tape:
            output = function()
        self.recorded.append(len(output.logits))

        def replay() -> Decoded:
            self.replayed.append(len(output.logits))
            tape.play()
            return output

        return replay
