"""Small steps of every kind for which Triton compiles its own kernels. Start-up runs them, so serving compiles nothing.

A kernel of a layer depends on the model, on whether a sequence has more than one new token, on whether the step has
many tokens, on whether a token sees later ones, and on the number of sequences, rounded up to a power of two. The
kernel for penalties depends on the model alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from decoder_svc.scheduling.prompt import Span
from decoder_svc.scheduling.request import RequestId
from decoder_svc.scheduling.sampling_params import SamplingParams
from decoder_svc.scheduling.scheduler_output import (
    AdmittedRequest,
    ScheduledChunk,
    SchedulerOutput,
    SlidingTable,
    StateUse,
)
from lookonce.families.base import Mask

# Up to this many sequences share kernels (`triton_splits.py`).
_NUM_SEQUENCES = 64
# Steps with more tokens than this are steps with many (`triton_attention.py`). It is one of the sizes of graphs
# (`chunk_table.py`), so padding makes no difference.
MAX_NARROW_TOKENS = 128


def kernel_steps(
    max_num_seqs: int, mask: Mask, block_size: int, *, has_sliding_group: bool, has_states: bool = False
) -> Iterator[SchedulerOutput]:
    """Yields the steps, each followed by one that releases its requests. All tokens are in block 0."""
    later = (False,) if mask is Mask.CAUSAL else (False, True)
    for num_sequences, in_all, sees_later in itertools.product(
        _sequence_counts(max_num_seqs), (1, 2, MAX_NARROW_TOKENS + 1), later
    ):
        # A step of sequences with two tokens may have many tokens already.
        num_tokens = max(min(in_all, 2), -(-in_all // num_sequences))
        names = [RequestId(f"kernels-{index}") for index in range(num_sequences)]
        spans = (Span(0, num_tokens),) if sees_later else ()
        params = SamplingParams(max_tokens=1, repetition_penalty=1.05)
        admitted = tuple(
            AdmittedRequest(name, (0,) * num_tokens, num_tokens, (), None, spans, params) for name in names
        )
        table = (0,) * -(-num_tokens // block_size)
        sliding = SlidingTable(0, 0, table) if has_sliding_group else None
        chunks = tuple(
            ScheduledChunk(
                name,
                0,
                num_tokens,
                0,
                0,
                table,
                samples=True,
                sliding=sliding,
                states=StateUse(slot, None, ()) if has_states else None,
            )
            for slot, name in enumerate(names)
        )
        yield SchedulerOutput(admitted, chunks, (), (), ())
        yield SchedulerOutput((), (), tuple(names), (), ())


def _sequence_counts(max_num_seqs: int) -> list[int]:
    """Returns one number of sequences for each power of two that they are rounded up to."""
    doubled = itertools.takewhile(lambda count: count < max_num_seqs, (_NUM_SEQUENCES << n for n in itertools.count()))
    return [1, *(count + 1 for count in doubled)]
