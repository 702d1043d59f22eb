"""Penalties from counts of tokens that the device keeps, so that the host need not know a token before the next step.

The host compares how many tokens are counted with the length of each sequence. It counts what is missing, and counts a
sequence anew after a token was taken back or drawn again.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from decoder_svc.runner.sampling.penalties import LARGEST_SCORE, HostPenalties, PenalisedLogits
from decoder_svc.runner.sampling.sample_row import SampleRow
from decoder_svc.runner.sampling.sampling_batch import SamplingBatch
from decoder_svc.runner.sampling.sampling_state import CountSlot, IntArray

# A count, int32, is the number of occurrences in the output, plus this for a token of the prompt. A token that is in
# neither has 0.
IN_PROMPT = 1 << 30

# A function like `penalised_logits`.
Penalise = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def penalised_logits(logits: Tensor, counts: Tensor, slots: Tensor, numbers: Tensor) -> Tensor:
    """Returns new logits, float32 `[num_rows, vocab]`.

    `logits` are `[num_rows, vocab]`, `counts` int32 `[num_slots, vocab]` and `slots` int64 `[num_rows]`. `numbers`,
    float32 `[num_rows, 4]`, are the penalties for repetition, presence and frequency, and the largest score after the
    first of them.
    """
    scores = logits.float()
    counts = counts.index_select(0, slots)
    repetition, presence, frequency, largest = numbers.split(1, dim=1)
    repeated = torch.where(scores > 0, scores / repetition, scores * repetition).clamp(-largest, largest)
    occurrences = (counts & (IN_PROMPT - 1)).float()
    subtracted = torch.where(occurrences > 0, presence + frequency * occurrences, 0)
    return torch.where(counts > 0, repeated - subtracted, scores)


@dataclass(frozen=True, slots=True)
class _Staged:
    """Slots and parameters of a batch on the device, copied there once."""

    batch: SamplingBatch
    # Per row of logits: its slot, on the host and as int64 [num_rows] on the device.
    slots: tuple[int, ...]
    device_slots: Tensor
    # The argument of `penalised_logits`.
    numbers: Tensor
    # Indexes of the rows that are counted, int64 [num_counted], None: all; and the places of their slots in the
    # flattened counts, int64 [num_counted].
    indexes: Tensor | None
    firsts: Tensor


class DevicePenalties:
    """Keeps counts on the device for `num_slots` requests; each has a slot from its first penalised token on.

    Rows behind drafts, which may be dropped, are penalised with the host's counts, and so are rows without a slot.
    """

    def __init__(
        self,
        num_slots: int,
        vocab: int,
        device: torch.device,
        move: Callable[[Tensor], Tensor],
        penalise: Penalise = penalised_logits,
    ) -> None:
        """Allocates the counts. `vocab` is the length of a row of logits; `move` copies a tensor to the device."""
        self._move = move
        self._penalise = penalise
        self._host = HostPenalties(move)
        self._vocab = vocab
        # The last slot stays empty: it is that of rows that are not penalised here.
        self._counts = torch.zeros(num_slots + 1, vocab, dtype=torch.int32, device=device)
        self._one = torch.ones(1, dtype=torch.int32, device=device)
        self._empty_slot = num_slots
        self._free = list(range(num_slots))
        self._staged: _Staged | None = None

    @property
    def num_bytes(self) -> int:
        """Memory that the counts take on the device."""
        return int(self._counts.nbytes)

    @property
    def num_free_slots(self) -> int:
        """Number of slots that no request has."""
        return len(self._free)

    def apply(self, logits: Tensor, rows: Sequence[SampleRow], batch: SamplingBatch) -> PenalisedLogits:
        """Implements Penalties.apply. The next step may run ahead unless a row needs the host's counts."""
        assert logits.shape[1] == self._vocab, "logits of another vocabulary than that of the counts"
        slots = {index: self._slot(rows[index]) for index in batch.penalised}
        counted = {index: slot for index, slot in slots.items() if slot is not None}
        self._count_missing([(slot, rows[index]) for index, slot in counted.items()])
        staged = self._stage(batch, counted)
        penalised = self._penalise(logits, self._counts, staged.device_slots, staged.numbers)
        others = [index for index, slot in slots.items() if slot is None]
        if others:
            self._host.change(penalised, rows, others, batch)
        versions = {index: (slot, slot.version) for index, slot in counted.items()}
        return PenalisedLogits(
            logits=penalised,
            may_run_ahead=not others,
            count=functools.partial(self._count, staged, tuple(counted.values())),
            forget=functools.partial(_forget, versions),
        )

    def _slot(self, row: SampleRow) -> CountSlot | None:
        """Returns the slot of a row's request, which gets a free one if it has none. None: the host has to count."""
        state = row.state
        if row.num_drafts:
            return None
        if state.slot is None and self._free:
            index = self._free.pop()
            # A state that nobody has released gives its slot back when it is collected.
            free = weakref.finalize(state, self._free.append, index)
            free.atexit = False
            state.slot = CountSlot(index, free)
        return state.slot

    def _count_missing(self, rows: Sequence[tuple[CountSlot, SampleRow]]) -> None:
        """Makes the counts those of the rows' tokens."""
        begun: list[int] = []
        prompt: list[IntArray] = []
        output: list[IntArray] = []
        for slot, row in rows:
            num_tokens = len(row.token_ids)
            if slot.num_counted == num_tokens:
                continue
            # Each token that is taken back is sampled behind the next launch, which therefore knows all ids.
            assert row.is_known, "only the device knows a token that the host has to count"
            if slot.num_counted is None or slot.num_counted > num_tokens:
                begun.append(slot.index)
                slot.version += 1
                slot.num_counted = 0
            stop = max(slot.num_counted, row.num_prompt_tokens)
            prompt.append(self._places(slot, row.token_ids[slot.num_counted : stop]))
            output.append(self._places(slot, row.token_ids[stop:]))
            slot.num_counted = num_tokens
        if not output:
            return
        parts = [np.array(begun, dtype=np.int64), np.concatenate(prompt), np.concatenate(output)]
        moved = self._move(torch.from_numpy(np.concatenate(parts)))
        new_slots, prompt_places, output_places = moved.split([len(part) for part in parts])
        flat = self._counts.view(-1)
        self._counts.index_fill_(0, new_slots, 0)
        flat.index_fill_(0, prompt_places, IN_PROMPT)
        flat.index_add_(0, output_places, self._one.expand(len(output_places)))

    def _places(self, slot: CountSlot, token_ids: IntArray) -> IntArray:
        """Returns the tokens' places in the flattened counts, without placeholders beyond the vocabulary."""
        return slot.index * self._vocab + token_ids[token_ids < self._vocab]

    def _stage(self, batch: SamplingBatch, counted: dict[int, CountSlot]) -> _Staged:
        """Copies slots and penalties to the device, unless they are those of the last step."""
        of_rows = [self._empty_slot] * len(batch.params)
        for index, slot in counted.items():
            of_rows[index] = slot.index
        slots = tuple(of_rows)
        staged = self._staged
        if staged is None or staged.batch is not batch or staged.slots != slots:
            firsts = [slot.index * self._vocab for slot in counted.values()]
            is_all = len(counted) == len(slots)
            largest = LARGEST_SCORE if batch.has_repetition else torch.inf
            numbers = [
                (params.repetition_penalty, params.presence_penalty, params.frequency_penalty, largest)
                for params in batch.params
            ]
            staged = self._staged = _Staged(
                batch=batch,
                slots=slots,
                device_slots=self._move(torch.tensor(slots)),
                numbers=self._move(torch.tensor(numbers, dtype=torch.float32)),
                indexes=None if is_all else self._move(torch.tensor(list(counted), dtype=torch.int64)),
                firsts=self._move(torch.tensor(firsts, dtype=torch.int64)),
            )
        return staged

    def _count(self, staged: _Staged, slots: Sequence[CountSlot], token_ids: Tensor) -> None:
        ids = token_ids if staged.indexes is None else token_ids.index_select(0, staged.indexes)
        self._counts.view(-1).index_add_(0, staged.firsts + ids, self._one.expand(len(slots)))
        for slot in slots:
            assert slot.num_counted is not None, "ids are counted behind a sequence that is not"
            slot.num_counted += 1


def _forget(versions: dict[int, tuple[CountSlot, int]], indexes: Iterable[int]) -> None:
    """Has the slots of these rows counted anew, unless that was done since."""
    for index in indexes:
        slot, version = versions.get(index, (None, 0))
        if slot is not None and slot.version == version:
            slot.num_counted = None
