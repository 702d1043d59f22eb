"""Samples a step's rows in one native pass (native/sampling.cpp), where the native kernels run."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from decoder_svc.runner.sampling.sample_row import SampleRow
from decoder_svc.runner.sampling.sampler import PendingSample, SampledRows
from decoder_svc.scheduling.request_output import TokenLogprobs
from decoder_svc.scheduling.sampling_params import SamplingParams
from lookonce.model.kernels.native_library import NativeLibrary

# The fields of SampledRow in C++. Addresses are integers.
_ROW = np.dtype(
    [
        ("temperature", "f8"),
        ("top_p", "f8"),
        ("min_p", "f8"),
        ("log_min_p", "f8"),
        ("uniform", "f8"),
        ("top_k", "i8"),
        ("seen_ids", "u8"),
        ("seen_counts", "u8"),
        ("num_seen", "i8"),
        ("bias_ids", "u8"),
        ("biases", "u8"),
        ("num_biases", "i8"),
        ("stop_ids", "u8"),
        ("num_stops", "i8"),
        ("mask", "u8"),
        ("num_logprobs", "i8"),
        ("logprob_ids", "u8"),
        ("logprobs", "u8"),
        ("num_likeliest", "i8"),
        ("likeliest_ids", "u8"),
        ("repetition_penalty", "f4"),
        ("presence_penalty", "f4"),
        ("frequency_penalty", "f4"),
    ],
    align=True,
)


# The log probabilities of a step in which no request asks for them.
_NO_IDS, _NO_NUMBERS = np.zeros((0, 0), dtype=np.int64), np.zeros((0, 0), dtype=np.float32)


@dataclass(frozen=True, slots=True)
class _Table:
    """The parameters of a step's rows, which are the same in most steps."""

    params: tuple[SamplingParams, ...]
    vocab: int
    # Without what changes from step to step.
    rows: npt.NDArray[np.void]
    # The ids of each row that must not come before `min_tokens`.
    stop_ids: list[npt.NDArray[np.int64]]
    # The arrays that the rows point to.
    held: list[npt.NDArray[np.generic]]
    # Whether nothing changes from step to step: all rows are greedy, without penalties and log probabilities.
    is_fixed: bool

    def holds(self, params: Sequence[SamplingParams], vocab: int) -> bool:
        """Whether these are the parameters of this table. Objects are compared by identity, which takes less time."""
        return (
            len(params) == len(self.params)
            and vocab == self.vocab
            and all(one is other for one, other in zip(params, self.params, strict=True))
        )


class NativeSampler:
    """Samples the rows of each step on the CPU. Gives the tokens of Sampler, but where logits are equal."""

    is_immediate = True

    def __init__(self, library: NativeLibrary, num_threads: int) -> None:
        self._function = library.function("lookonce_sample")
        self._num_threads = num_threads
        self._table: _Table | None = None

    def launch(self, logits: Tensor, rows: Sequence[SampleRow], likeliest: Tensor | None = None) -> PendingSample:
        """Does what Sampler.launch does. The tokens are known when it returns."""
        vocab = logits.shape[1]
        logits = logits.float().contiguous()
        params = tuple([row.params for row in rows])
        if self._table is None or not self._table.holds(params, vocab):
            self._table = _table(params, vocab)
        table = self._table
        if table.is_fixed and all(row.mask is None and not row.num_likeliest for row in rows):
            chosen, nan = self._chosen(logits, table.rows)
            sampled = SampledRows(chosen.tolist(), [None] * len(rows), nan=nan)
            return PendingSample(chosen, True, lambda: sampled)
        of_rows = table.rows.copy()
        held = [array for index in range(len(rows)) for array in _fill(of_rows[index], rows[index], table, index)]
        ids, numbers = _reports(of_rows)
        likeliest_ids = _likeliest(of_rows, rows)
        chosen, nan = self._chosen(logits, of_rows)
        found = [[token_id for token_id in of_row if token_id >= 0] for of_row in likeliest_ids.tolist()]
        logprobs = _listed(of_rows["num_logprobs"], ids, numbers)
        sampled = SampledRows(chosen.tolist(), logprobs, nan=nan, likeliest=found)
        # Penalties and masks need the tokens before them.
        return PendingSample(chosen, not held, lambda: sampled)

    def _chosen(self, logits: Tensor, of_rows: npt.NDArray[np.void]) -> tuple[Tensor, tuple[int, ...]]:
        """Returns one token for each row, and the rows whose logits are NaN, which have any token."""
        chosen = torch.empty(len(of_rows), dtype=torch.int64)
        self._function(
            ctypes.c_void_p(logits.data_ptr()),
            ctypes.c_int64(len(of_rows)),
            ctypes.c_int64(logits.shape[1]),
            ctypes.c_void_p(of_rows.ctypes.data),
            ctypes.c_void_p(chosen.data_ptr()),
            ctypes.c_int64(self._num_threads),
        )
        nan = tuple([index for index, token_id in enumerate(chosen.tolist()) if token_id < 0])
        return (torch.where(chosen < 0, ~chosen, chosen) if nan else chosen), nan


def _fill(of_row: np.void, row: SampleRow, table: _Table, index: int) -> list[npt.NDArray[np.generic]]:
    """Writes what changes from step to step. Returns the arrays that the row points to."""
    params, place = row.params, row.num_output_tokens
    if not params.is_greedy:
        of_row["uniform"] = row.state.draws[place]
    if place < params.min_tokens:
        _point(of_row, "stop_ids", table.stop_ids[index], "num_stops")
    held: list[npt.NDArray[np.generic]] = []
    if params.is_penalised:
        ids, counts = row.counts()
        held += [ids, counts]
        _point(of_row, "seen_ids", ids, "num_seen")
        _point(of_row, "seen_counts", counts)
    if row.mask is not None:
        mask = np.frombuffer(row.mask, dtype=np.uint8)
        held.append(mask)
        _point(of_row, "mask", mask)
    return held


def _point(of_row: np.void, name: str, array: npt.NDArray[np.generic], length: str | None = None) -> None:
    of_row[name] = array.ctypes.data
    if length is not None:
        of_row[length] = len(array)


def _table(params: tuple[SamplingParams, ...], vocab: int) -> _Table:
    rows = np.zeros(len(params), dtype=_ROW)
    stop_ids: list[npt.NDArray[np.int64]] = []
    held: list[npt.NDArray[np.generic]] = []
    for of_row, one in zip(rows, params, strict=True):
        of_row["temperature"], of_row["top_p"], of_row["min_p"] = one.temperature, one.top_p, one.min_p
        of_row["log_min_p"] = math.log(one.min_p) if one.min_p > 0 else 0.0
        of_row["top_k"] = min(one.top_k or vocab, vocab)
        of_row["repetition_penalty"] = one.repetition_penalty
        of_row["presence_penalty"], of_row["frequency_penalty"] = one.presence_penalty, one.frequency_penalty
        of_row["num_logprobs"] = -1 if one.logprobs is None else min(one.logprobs, vocab)
        stop_ids.append(np.array(sorted(one.stop_token_ids), dtype=np.int64))
        if one.logit_bias:
            ids = np.array([token_id for token_id, _ in one.logit_bias], dtype=np.int64)
            biases = np.array([addend for _, addend in one.logit_bias], dtype=np.float32)
            held += [ids, biases]
            _point(of_row, "bias_ids", ids, "num_biases")
            _point(of_row, "biases", biases)
    is_fixed = all(
        one.is_greedy and not one.is_penalised and not one.min_tokens and one.logprobs is None for one in params
    )
    return _Table(params, vocab, rows, stop_ids, held, is_fixed)


def _reports(of_rows: npt.NDArray[np.void]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Makes room for the log probabilities of all rows, `[num_rows, 1 + most]`, and has the rows point to it."""
    shape = len(of_rows), 1 + int(of_rows["num_logprobs"].max(initial=-1))
    if not shape[1]:
        return _NO_IDS, _NO_NUMBERS
    ids, numbers = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.float32)
    of_rows["logprob_ids"] = ids.ctypes.data + np.arange(len(of_rows)) * ids.strides[0]
    of_rows["logprobs"] = numbers.ctypes.data + np.arange(len(of_rows)) * numbers.strides[0]
    return ids, numbers


def _likeliest(of_rows: npt.NDArray[np.void], rows: Sequence[SampleRow]) -> npt.NDArray[np.int64]:
    """Makes room for the likeliest tokens of all rows, `[num_rows, most]`, -1 where there is none."""
    wanted = [row.num_likeliest for row in rows]
    if not any(wanted):
        return np.zeros((0, 0), dtype=np.int64)
    ids = np.full((len(rows), max(wanted)), -1, dtype=np.int64)
    of_rows["num_likeliest"] = wanted
    of_rows["likeliest_ids"] = ids.ctypes.data + np.arange(len(rows)) * ids.strides[0]
    return ids


def _listed(
    wanted: npt.NDArray[np.int64], ids: npt.NDArray[np.int64], numbers: npt.NDArray[np.float32]
) -> list[TokenLogprobs | None]:
    if not len(ids):
        return [None] * len(wanted)
    return [
        None if number < 0 else TokenLogprobs(tuple(zip(of_ids[: 1 + number], of_numbers[: 1 + number], strict=True)))
        for number, of_ids, of_numbers in zip(wanted.tolist(), ids.tolist(), numbers.tolist(), strict=True)
    ]
