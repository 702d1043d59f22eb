"""The choice of a step's graph: by number of tokens, kinds of chunks, and rows of images."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from decoder_svc.runner.graphs.chunk_table import ChunkInputs, ChunkShape
from decoder_svc.runner.graphs.decode_table import DecodeInputs, StepShape
from decoder_svc.runner.graphs.inputs import PoolShape
from decoder_svc.runner.graphs.step_graphs import GraphSizes, StepGraphs
from decoder_svc.runner.host_transfer import HostTransfer
from decoder_svc.scheduling.prompt import Span
from tests.decoder_svc.runner.graphs.test_chunk_table import step
from tests.decoder_svc.runner.graphs.test_decode_table import nothing_to_feed

SHAPE = StepShape(3, 4, PoolShape(50, 300), None)
SIZES = GraphSizes((1, 2, 4), (8, 16))
VOCAB = 12


@dataclass
class Passes:
    """A model whose logits are one at the token's own id; notes the passes that ran."""

    records_rows: bool = True
    waits_for_chunks: bool = False
    ran: list[str] = field(default_factory=list)

    def decode(self, inputs: DecodeInputs) -> Tensor:
        self.ran.append(f"decode {len(inputs.token_ids)}")
        return self._one_hot(inputs.token_ids)

    def compute_chunks(self, inputs: ChunkInputs) -> Tensor:
        if self.waits_for_chunks:
            raise RuntimeError("a chunk waits")
        self.ran.append(f"chunks {len(inputs.token_ids)}")
        ids = torch.where(inputs.has_row, inputs.rows[:, 0].long(), inputs.token_ids)
        return self._one_hot(ids[inputs.sampled_indexes])

    def _one_hot(self, ids: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(ids, VOCAB).float()


def graphs_of(passes: Passes, sizes: GraphSizes = SIZES) -> StepGraphs:
    graphs = StepGraphs(sizes, SHAPE, ChunkShape(6, torch.float32, None), HostTransfer(torch.device("cpu")))
    graphs.capture(passes, lambda function: (function(), function)[1])
    return graphs


def place_eleven(rows: Tensor) -> list[int]:
    """Writes a row that stands for id 11 at the last token."""
    rows[-1, 0] = 11
    return [len(rows) - 1]


def test_the_largest_is_recorded_first_and_chunks_before_single_tokens() -> None:
    passes = Passes()
    graphs = graphs_of(passes)
    assert passes.ran == ["chunks 16", "chunks 8", "decode 4", "decode 2", "decode 1"]
    assert graphs.sizes == SIZES


@pytest.mark.parametrize(
    ("lengths", "wanted"),
    [([1], "decode 1"), ([1, 1, 1], "decode 4"), ([2], "chunks 8"), ([1, 8, 1], "chunks 16"), ([17], None),
     ([1] * 5, None), ([2, 1, 1, 1, 1], None)],
)  # fmt: skip
def test_a_step_without_images(lengths: list[int], wanted: str | None) -> None:
    passes = Passes()
    graphs = graphs_of(passes)
    passes.ran.clear()
    flat = step(lengths, has_sliding_group=False)
    decoded = graphs.replay(flat, nothing_to_feed)
    assert passes.ran == ([] if wanted is None else [wanted])
    assert (decoded is None) == (wanted is None)
    if decoded is not None:
        assert decoded.likeliest.tolist() == flat.token_ids[flat.sampled_indexes].tolist()
        assert decoded.logits.argmax(1).tolist() == decoded.likeliest.tolist()


@pytest.mark.parametrize("lengths", [[1, 1], [3, 1]])
def test_ids_that_only_the_device_has_are_fed(lengths: list[int]) -> None:
    flat = step(lengths, has_sliding_group=False)

    def feed(token_ids: Tensor) -> None:
        token_ids[len(flat.token_ids) - 1] = 11

    decoded = graphs_of(Passes()).replay(flat, feed)
    assert decoded is not None
    assert decoded.likeliest.tolist() == [*flat.token_ids[flat.sampled_indexes][:-1], 11]


@pytest.mark.parametrize("lengths", [[1], [3, 2]])
def test_tokens_of_images_get_their_rows(lengths: list[int]) -> None:
    flat = step(lengths, has_sliding_group=False)
    decoded = graphs_of(Passes()).replay(flat, nothing_to_feed, place_eleven)
    assert decoded is not None
    assert decoded.likeliest.tolist() == [*flat.token_ids[flat.sampled_indexes][:-1], 11]
    assert graphs_of(Passes(records_rows=False)).replay(flat, nothing_to_feed, place_eleven) is None


def test_a_single_token_that_sees_later_ones_is_a_chunk() -> None:
    passes = Passes()
    graphs = graphs_of(passes)
    flat = replace(step([1], has_sliding_group=False), mutual_spans=((Span(0, 30),),))
    assert graphs.replay(flat, nothing_to_feed) is not None
    assert passes.ran[-1] == "chunks 8"


def test_only_some_tokens_of_single_token_steps_are_sampled() -> None:
    flat = step([1, 1, 1], has_sliding_group=False)
    flat = replace(flat, sampled_indexes=flat.sampled_indexes[1:])
    decoded = graphs_of(Passes()).replay(flat, nothing_to_feed)
    assert decoded is not None
    assert decoded.likeliest.tolist() == flat.token_ids[1:].tolist()


def test_all_results_share_memory() -> None:
    graphs = graphs_of(Passes())
    steps = [step(lengths, has_sliding_group=False) for lengths in ([1], [1, 1, 1], [5, 2])]
    found = [graphs.replay(flat, nothing_to_feed) for flat in steps]
    assert len({decoded.logits.data_ptr() for decoded in found if decoded is not None}) == 1


def test_chunks_that_cannot_be_recorded_leave_steps_of_single_tokens(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        graphs = graphs_of(Passes(waits_for_chunks=True))
    assert "no graphs of steps with prompt chunks: a chunk waits" in caplog.text
    assert graphs.sizes == GraphSizes((1, 2, 4), ())
    assert graphs.replay(step([3], has_sliding_group=False), nothing_to_feed) is None
    assert graphs.replay(step([1], has_sliding_group=False), nothing_to_feed) is not None
    assert graphs_of(Passes(), GraphSizes((1,), ())).replay(step([3], has_sliding_group=False), nothing_to_feed) is None
