"""The weight that the tensors of a quantized layer stand for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lookonce.model.kernels.quantized_weight import CodeForm, QuantizedWeight
from lookonce.model.quantized_folder.layout import Layout
from lookonce.model.quantized_folder.storage import Method

# Column of a word of eight AWQ codes -> place of its four bits, counted from the lowest.
_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
# Groups for which the kernels add up products: a block of up to 128 inputs has one scale.
_BLOCK_INPUTS = 128
_LEAST_GROUP = 16
_FLOAT8_NAN = 0x7F


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A layer's tensors by the last part of their names, which may be in a mapped file."""

    layout: Layout
    tensors: Mapping[str, Tensor]
    # The type of the weight that codes stand for.
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """The numbers of outputs and of inputs."""
        return torch.Size((self.layout.num_outputs, self.layout.num_inputs))

    @property
    def stored(self) -> Iterable[Tensor]:
        """The tensors of which the weight is computed."""
        return self.tensors.values()

    def has_readable_groups(self) -> bool:
        """Whether the kernels can read such groups as codes. Raises ModelFolderError for inputs without a group."""
        size = self.layout.group_inputs
        if self.layout.num_inputs % 2 or self._group_of_inputs() is not None:
            return False
        if size >= self.layout.num_inputs or size % _BLOCK_INPUTS == 0:
            return True
        return _LEAST_GROUP <= size < _BLOCK_INPUTS and size % 2 == 0

    def quantized(self) -> QuantizedWeight:
        """Returns the weight as codes, computed anew. Groups must be readable."""
        codes, zeros, scales = self._parts()
        offsets = torch.zeros_like(scales) if self.layout.form is CodeForm.FLOAT8 else -zeros * scales
        return QuantizedWeight(codes, scales, offsets, self.layout.form, self.layout.group_inputs, self.dtype)

    def whole(self) -> Tensor:
        """Returns the weight in its type, computed anew."""
        codes, zeros, scales = self._parts()
        numbers = codes.view(torch.float8_e4m3fn).float() if self.layout.form is CodeForm.FLOAT8 else codes.float()
        group = self._group_of_inputs()
        if group is None:
            group = torch.arange(self.layout.num_inputs) // self.layout.group_inputs
        return ((numbers - zeros.expand_as(scales)[:, group]) * scales[:, group]).to(self.dtype)

    def _parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns codes int8 [outputs, inputs], and zero points and scales float32 [outputs, groups].

        Zero points may have fewer rows and columns, to be broadcast. Raises ModelFolderError for a code of NaN.
        """
        codes, zeros = self._codes_and_zeros()
        name = next(name for name in ("scales", "weight_scale_inv", "weight_scale") if name in self.tensors)
        scales = self.tensors[name].float()
        if name == "scales":
            return codes, zeros, scales.T.contiguous()
        rows = scales.reshape(-1, self.layout.num_groups)
        if self.layout.group_outputs > 1:
            rows = rows.repeat_interleave(self.layout.group_outputs, dim=0)[: self.layout.num_outputs]
        return codes, zeros, rows.contiguous()

    def _codes_and_zeros(self) -> tuple[Tensor, Tensor]:
        bits, method = self.layout.form.bits, self.layout.storage.method
        if method is Method.GPTQ:
            # Its tools add to whole words, too: a zero point of 0 has borrowed from its neighbour.
            shift = self.layout.storage.zero_shift * (0x11111111 if bits == 4 else 0x01010101)
            zeros = _unpacked(self.tensors["qzeros"] + shift, bits).T
            return self._centred(_unpacked(self.tensors["qweight"].T, bits), zeros)
        if method is Method.AWQ:
            codes, zeros = (_in_awq_order(_unpacked(self.tensors[name], 4)).T for name in ("qweight", "qzeros"))
            return self._centred(codes, zeros)
        stored = self.tensors.get("weight_zero_point")
        if "weight_packed" in self.tensors:
            middle = torch.full((1, 1), 1 << bits - 1, dtype=torch.uint8)
            zeros = middle if stored is None else _unpacked(stored.T, bits).T
            return self._centred(_unpacked(self.tensors["weight_packed"], bits), zeros)
        codes = self.tensors["weight"].view(torch.int8)
        if self.layout.form is CodeForm.FLOAT8 and bool(((codes & _FLOAT8_NAN) == _FLOAT8_NAN).any()):
            raise self.layout.error("a weight is not a number; download the model again")
        return codes, torch.zeros(1, 1) if stored is None else stored.float().reshape(-1, self.layout.num_groups)

    def _centred(self, codes: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor]:
        """Makes signed codes of unsigned ones of 8 bits, and cuts off padding."""
        codes = codes[: self.layout.num_outputs, : self.layout.num_inputs]
        zeros = zeros[: self.layout.num_outputs].float()
        if self.layout.form is CodeForm.INT8:
            return (codes ^ 0x80).contiguous().view(torch.int8), zeros - 128
        return codes.contiguous().view(torch.int8), zeros

    def _group_of_inputs(self) -> Tensor | None:
        """Returns the group of each input, int64 [inputs]; None if groups are neighbouring inputs, in order."""
        stored = self.tensors.get("g_idx", self.tensors.get("weight_g_idx"))
        # compressed-tensors writes -1 where inputs are in order.
        if stored is None or bool((stored == -1).all()):
            return None
        group = stored.long()
        if bool((group < 0).any()) or bool((group >= self.layout.num_groups).any()):
            raise self.layout.error(f"an input is in none of the {self.layout.num_groups} groups")
        return None if torch.equal(group, torch.arange(len(group)) // self.layout.group_inputs) else group


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Returns unsigned codes uint8 [rows, codes] of words int32 [rows, words], from the lowest bits of each word."""
    octets = words.contiguous().view(torch.uint8)
    return octets if bits == 8 else torch.stack((octets & 15, octets >> 4), dim=2).flatten(1)


def _in_awq_order(codes: Tensor) -> Tensor:
    return codes.unflatten(1, (-1, len(_AWQ_PLACES)))[:, :, _AWQ_PLACES].flatten(1)
