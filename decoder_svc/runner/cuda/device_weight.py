"""A quantized weight in a device's memory, in the order in which the kernels of `triton_quantized.py` read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lookonce.model.kernels.quantized_weight import CodeForm, QuantizedWeight

# Inputs of a tile. Those of a tile have one scale, and Triton multiplies no fewer than 16.
_MAX_TILE, _MIN_TILE = 64, 16


@dataclass(frozen=True, slots=True)
class DeviceWeight:
    """A weight `[outputs, inputs]` as codes, scales and offsets."""

    # int8 [outputs, row_bytes], in whole tiles. A code of 8 bits takes a byte. A byte of a tile of INT4 has two: its
    # lower bits belong to the tile's first `tile_inputs` inputs, its upper bits to as many that follow.
    codes: Tensor
    # [groups, outputs], in the smallest type that holds them exactly. Its rows may be longer.
    scales: Tensor
    # The same; None: all are 0.
    offsets: Tensor | None
    form: CodeForm
    # A multiple of `tile_inputs`. A layer with one group has a multiple that is not less than its inputs.
    group_inputs: int
    num_inputs: int
    # Inputs of a byte's lower bits.
    tile_inputs: int
    # The type of the weight that this stands for.
    dtype: torch.dtype

    @classmethod
    def of(cls, weight: QuantizedWeight, device: torch.device) -> DeviceWeight:
        """Copies a weight to a device. Its groups must be readable: `tile_inputs` must not be None."""
        tile = tile_inputs(weight)
        assert tile is not None, "the groups of inputs are not readable"
        is_int4 = weight.form is CodeForm.INT4
        num_outputs, num_inputs = weight.shape
        codes = weight.codes.to(device)
        # Inputs that fill a tile have the last one's code: their weights are numbers of the weight's type like its own.
        padding = -num_inputs % (2 * tile if is_int4 else tile)
        codes = torch.cat([codes, codes[:, -1:].expand(-1, padding)], dim=1)
        if is_int4:
            halves = codes.view(num_outputs, -1, 2, tile)
            codes = (halves[:, :, 0] | (halves[:, :, 1] << 4)).flatten(1)
        is_one_group = weight.scales.shape[1] == 1
        return cls(
            codes.contiguous(),
            _narrowed(weight.scales).T.contiguous().to(device),
            _narrowed(weight.offsets).T.contiguous().to(device) if bool(weight.offsets.any()) else None,
            weight.form,
            -(-num_inputs // tile) * tile if is_one_group else weight.group_inputs,
            num_inputs,
            tile,
            weight.dtype,
        )

    @property
    def num_outputs(self) -> int:
        """The number of outputs of the layer."""
        return len(self.codes)

    @property
    def row_bytes(self) -> int:
        """Bytes of the codes of an output, with padding."""
        return int(self.codes.shape[1])

    @property
    def num_tiles(self) -> int:
        """Tiles of codes of an output."""
        inputs_each = self.tile_inputs * (2 if self.form is CodeForm.INT4 else 1)
        return -(-self.num_inputs // inputs_each)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and offsets."""
        tensors = self.codes, self.scales, *([] if self.offsets is None else [self.offsets])
        return sum(int(tensor.nbytes) for tensor in tensors)

    @property
    def kind(self) -> tuple[object, ...]:
        """The properties in which weights agree that can be joined."""
        return self.form, self.group_inputs, self.num_inputs, self.tile_inputs, self.dtype

    def dequantized(self) -> Tensor:
        """Returns the weight in its type, computed by operators of PyTorch."""
        parts = [self.codes.view(-1, self.num_tiles, self.tile_inputs)]
        if self.form is CodeForm.INT4:
            octets = parts[0].view(torch.uint8)
            parts = [octets & 15, octets >> 4]
        elif self.form is CodeForm.FLOAT8:
            parts = [parts[0].view(torch.float8_e4m3fn)]
        numbers = torch.stack([part.float() for part in parts], dim=2).flatten(1)[:, : self.num_inputs]
        group = torch.arange(self.num_inputs, device=self.codes.device) // self.group_inputs
        weight = numbers * self.scales.float()[group].T
        if self.offsets is not None:
            weight += self.offsets.float()[group].T
        return weight.to(self.dtype)

    def outputs(self, start: int, stop: int) -> DeviceWeight:
        """Returns the weight of these outputs, which shares the memory of this one."""
        return replace(
            self,
            codes=self.codes[start:stop],
            scales=self.scales[:, start:stop],
            offsets=None if self.offsets is None else self.offsets[:, start:stop],
        )


def tile_inputs(weight: QuantizedWeight) -> int | None:
    """Returns the inputs of a tile; None if the kernels cannot read such groups."""
    tile = _MAX_TILE
    if weight.scales.shape[1] == 1:
        return tile
    while weight.group_inputs % tile:
        tile //= 2
    return tile if tile >= _MIN_TILE else None


def joined(weights: Sequence[DeviceWeight]) -> DeviceWeight:
    """Returns the outputs of all weights, which must be of one kind."""
    assert len({weight.kind for weight in weights}) == 1, "weights of several kinds are not joined"
    has_offsets = any(weight.offsets is not None for weight in weights)
    offsets = [torch.zeros_like(each.scales.float()) if each.offsets is None else each.offsets for each in weights]
    return replace(
        weights[0],
        codes=torch.cat([weight.codes for weight in weights]),
        # A type that holds the numbers of all.
        scales=torch.cat([weight.scales for weight in weights], dim=1),
        offsets=torch.cat(offsets, dim=1) if has_offsets else None,
    )


def _narrowed(values: Tensor) -> Tensor:
    """Returns float32 values in bfloat16 or float16 if it holds them exactly."""
    for dtype in (torch.bfloat16, torch.float16):
        narrow = values.to(dtype)
        if torch.equal(narrow.float(), values):
            return narrow
    return values
