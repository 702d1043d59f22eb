"""Products with quantized weights in Triton. Codes are expanded in registers, to the numbers of the whole weight.

A step of few tokens waits for the device's memory, and reads a half or a quarter of what it would read of bfloat16. For
many tokens, a layer's weight is expanded to memory and multiplied by PyTorch.

Importing this module needs Triton. It runs on CUDA, and anywhere in Triton's interpreter (TRITON_INTERPRET=1).
"""

# Arguments of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from decoder_svc.runner.cuda.device_weight import DeviceWeight
from lookonce.model.kernels.quantized_weight import CodeForm

# More rows are multiplied with an expanded weight: each tile of rows expands the codes again. Estimated from a device's
# numbers of operations and bytes per second; not measured.
_MAX_TILED_ROWS = 128
# Rows of a tile: few for steps of single tokens, otherwise many.
_FEW_ROWS, _MANY_ROWS = 16, 64
# A number of rows for each kernel.
ROW_COUNTS = (1, _FEW_ROWS + 1, _MAX_TILED_ROWS + 1)
# Outputs of a program: the rows of a product of matrices on an H100.
_OUTPUTS = 64
# Programs per multiprocessor among which inputs are divided.
_PROGRAMS_EACH = 2
# Inputs that a program has at least, in tiles of codes.
_LEAST_TILES = 2
_JOINED_COLUMNS = 256

_INT4 = tl.constexpr(int(CodeForm.INT4))
_FLOAT8 = tl.constexpr(int(CodeForm.FLOAT8))


@triton.jit
def _numbers(codes, FORM: tl.constexpr):
    """Returns the numbers of codes of 8 bits, float32."""
    if FORM == _FLOAT8:
        # The fraction and the exponent of e4m3 are those of a float16 that is 256 times smaller.
        wide = codes.to(tl.uint8, bitcast=True).to(tl.uint16)
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        return bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return codes.to(tl.float32)


@triton.jit
def _weights(
    numbers, scales, offsets, output, is_output, num_inputs, first, scale_stride,
    GROUP: tl.constexpr, HAS_OFFSETS: tl.constexpr,
):  # fmt: skip
    """Returns weights of a tile of inputs from `first` on, which are of one group; 0 if `first` does not exist."""
    group = first // GROUP
    is_scaled = is_output & (first < num_inputs)
    scale = tl.load(scales + group * scale_stride + output, mask=is_scaled, other=0.0).to(tl.float32)
    weights = numbers * scale[:, None]
    if HAS_OFFSETS:
        offset = tl.load(offsets + group * scale_stride + output, mask=is_scaled, other=0.0).to(tl.float32)
        weights += offset[:, None]
    return weights


@triton.jit
def _added(sums, weights, inputs, row, is_row, num_inputs, first, TILE: tl.constexpr):
    """Adds the products of some inputs: `weights` is `[outputs, TILE]`, and so many inputs of each row are read."""
    place = first + tl.arange(0, TILE)
    is_input = (place < num_inputs)[:, None] & is_row[None, :]
    tile = tl.load(inputs + row.to(tl.int64)[None, :] * num_inputs + place[:, None], mask=is_input, other=0.0)
    return tl.dot(weights.to(tile.dtype), tile, acc=sums, input_precision="ieee")


# Numbers that differ between steps and layers. A variant for 1 and for multiples of 16 would be compiled while serving.
@triton.jit(do_not_specialize=["num_rows", "num_outputs", "tiles_each", "num_tiles", "scale_stride"])
def _multiply(
    inputs, codes, scales, offsets, bias, output, num_rows, num_outputs, num_inputs, row_bytes, scale_stride,
    tiles_each, num_tiles,
    FORM: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, HAS_OFFSETS: tl.constexpr, HAS_BIAS: tl.constexpr,
    NUM_ROWS: tl.constexpr, NUM_OUTPUTS: tl.constexpr,
):  # fmt: skip
    """Multiplies rows with part of the inputs of some outputs. Grid: tiles of outputs, tiles of rows, parts of inputs.

    Writes sums of part i to `output[i]`. Weights are the left side of the products, which registers may hold.
    """
    place = tl.program_id(0) * NUM_OUTPUTS + tl.arange(0, NUM_OUTPUTS)
    is_output = place < num_outputs
    row = tl.program_id(1) * NUM_ROWS + tl.arange(0, NUM_ROWS)
    is_row = row < num_rows
    part = tl.program_id(2)
    columns = tl.arange(0, TILE)
    sums = tl.zeros([NUM_OUTPUTS, NUM_ROWS], tl.float32)
    begin = part * tiles_each
    for tile in range(begin, tl.minimum(begin + tiles_each, num_tiles)):
        start = codes + place.to(tl.int64)[:, None] * row_bytes + tile * TILE + columns[None, :]
        stored = tl.load(start, mask=is_output[:, None], other=0)
        if FORM == _INT4:
            octets = stored.to(tl.uint8, bitcast=True)
            first = tile * 2 * TILE
            lower = _weights(
                (octets & 15).to(tl.float32), scales, offsets, place, is_output, num_inputs, first, scale_stride,
                GROUP, HAS_OFFSETS,
            )  # fmt: skip
            sums = _added(sums, lower, inputs, row, is_row, num_inputs, first, TILE)
            first += TILE
            upper = _weights(
                (octets >> 4).to(tl.float32), scales, offsets, place, is_output, num_inputs, first, scale_stride,
                GROUP, HAS_OFFSETS,
            )  # fmt: skip
            sums = _added(sums, upper, inputs, row, is_row, num_inputs, first, TILE)
        else:
            first = tile * TILE
            weights = _weights(
                _numbers(stored, FORM), scales, offsets, place, is_output, num_inputs, first, scale_stride,
                GROUP, HAS_OFFSETS,
            )  # fmt: skip
            sums = _added(sums, weights, inputs, row, is_row, num_inputs, first, TILE)
    if HAS_BIAS:
        sums += tl.load(bias + place, mask=is_output, other=0.0).to(tl.float32)[:, None]
    line = part.to(tl.int64) * num_rows + row
    target = output + line[None, :] * num_outputs + place[:, None]
    tl.store(target, sums.to(output.dtype.element_ty), mask=is_output[:, None] & is_row[None, :])


@triton.jit(do_not_specialize=["num_rows", "num_outputs", "num_parts"])
def _join(
    parts, bias, output, num_rows, num_outputs, num_parts, HAS_BIAS: tl.constexpr, NUM_COLUMNS: tl.constexpr
):  # fmt: skip
    """Adds the parts of a row's sums, and the bias. Grid: rows, tiles of outputs."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * NUM_COLUMNS + tl.arange(0, NUM_COLUMNS)
    is_output = place < num_outputs
    sums = tl.zeros([NUM_COLUMNS], tl.float32)
    for part in range(num_parts):
        sums += tl.load(parts + (part * num_rows + row) * num_outputs + place, mask=is_output, other=0.0)
    if HAS_BIAS:
        sums += tl.load(bias + place, mask=is_output, other=0.0).to(tl.float32)
    tl.store(output + row * num_outputs + place, sums.to(output.dtype.element_ty), mask=is_output)


@triton.jit(do_not_specialize=["num_outputs", "scale_stride"])
def _expand(
    codes, scales, offsets, whole, num_outputs, num_inputs, row_bytes, scale_stride,
    FORM: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, HAS_OFFSETS: tl.constexpr, NUM_OUTPUTS: tl.constexpr,
    HALVES: tl.constexpr,
):  # fmt: skip
    """Writes the weights of one tile of codes. Grid: tiles of codes, tiles of outputs."""
    place = tl.program_id(1) * NUM_OUTPUTS + tl.arange(0, NUM_OUTPUTS)
    is_output = place < num_outputs
    tile = tl.program_id(0)
    columns = tl.arange(0, TILE)
    line = place.to(tl.int64)[:, None]
    stored = tl.load(codes + line * row_bytes + tile * TILE + columns[None, :], mask=is_output[:, None], other=0)
    for half in tl.static_range(HALVES):
        first = (HALVES * tile + half) * TILE
        if FORM == _INT4:
            numbers = ((stored.to(tl.uint8, bitcast=True) >> 4 * half) & 15).to(tl.float32)
        else:
            numbers = _numbers(stored, FORM)
        weights = _weights(
            numbers, scales, offsets, place, is_output, num_inputs, first, scale_stride, GROUP, HAS_OFFSETS
        )  # fmt: skip
        target = whole + line * num_inputs + first + columns[None, :]
        is_stored = is_output[:, None] & (first + columns < num_inputs)[None, :]
        tl.store(target, weights.to(whole.dtype.element_ty), mask=is_stored)


def linear(inputs: Tensor, weight: DeviceWeight, bias: Tensor | None, num_processors: int) -> Tensor:
    """Returns `inputs @ weight.T + bias`, `[..., outputs]`, of inputs `[..., inputs]` in the weight's type.

    Sums are float32. `num_processors` is the device's number of multiprocessors.
    """
    rows = inputs.reshape(-1, weight.num_inputs).contiguous()
    if len(rows) > _MAX_TILED_ROWS:
        return F.linear(inputs, expanded(weight), bias)
    output = _tiled(rows, weight, bias, num_processors)
    return output.view(*inputs.shape[:-1], weight.num_outputs)


def _tiled(rows: Tensor, weight: DeviceWeight, bias: Tensor | None, num_processors: int) -> Tensor:
    num_rows, num_outputs = len(rows), weight.num_outputs
    output = torch.empty(num_rows, num_outputs, dtype=rows.dtype, device=rows.device)
    if not num_rows:
        return output
    num_tiles = weight.num_tiles
    output_tiles = triton.cdiv(num_outputs, _OUTPUTS)
    # The parts of a row's sums depend on the layer and the device alone.
    wanted = max(1, min(_PROGRAMS_EACH * num_processors // output_tiles, num_tiles // _LEAST_TILES))
    tiles_each = triton.cdiv(num_tiles, wanted)
    num_parts = triton.cdiv(num_tiles, tiles_each)
    is_divided = num_parts > 1
    target = rows.new_empty((num_parts, num_rows, num_outputs), dtype=torch.float32) if is_divided else output
    tile_rows = _FEW_ROWS if num_rows <= _FEW_ROWS else _MANY_ROWS
    added_bias = None if is_divided else bias
    _multiply[(output_tiles, triton.cdiv(num_rows, tile_rows), num_parts)](
        rows, weight.codes, weight.scales, _or(weight.offsets, weight.scales), _or(added_bias, rows), target,
        num_rows, num_outputs, weight.num_inputs, weight.row_bytes, weight.scales.stride(0), tiles_each, num_tiles,
        **_constants(weight), HAS_BIAS=added_bias is not None, NUM_ROWS=tile_rows, NUM_OUTPUTS=_OUTPUTS,
    )  # fmt: skip
    if is_divided:
        _join[(num_rows, triton.cdiv(num_outputs, _JOINED_COLUMNS))](
            target, _or(bias, rows), output, num_rows, num_outputs, num_parts,
            HAS_BIAS=bias is not None, NUM_COLUMNS=_JOINED_COLUMNS,
        )  # fmt: skip
    return output


def expanded(weight: DeviceWeight) -> Tensor:
    """Returns the whole weight `[outputs, inputs]`."""
    shape = weight.num_outputs, weight.num_inputs
    whole = torch.empty(shape, dtype=weight.dtype, device=weight.codes.device)
    _expand[(weight.num_tiles, triton.cdiv(weight.num_outputs, _OUTPUTS))](
        weight.codes, weight.scales, _or(weight.offsets, weight.scales), whole, *shape, weight.row_bytes,
        weight.scales.stride(0), **_constants(weight), NUM_OUTPUTS=_OUTPUTS,
        HALVES=2 if weight.form is CodeForm.INT4 else 1,
    )  # fmt: skip
    return whole


def _constants(weight: DeviceWeight) -> dict[str, int]:
    return {
        "FORM": int(weight.form),
        "GROUP": weight.group_inputs,
        "TILE": weight.tile_inputs,
        "HAS_OFFSETS": weight.offsets is not None,
    }


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """Returns the tensor, or in its place another one that the kernel does not read."""
    return other if tensor is None else tensor
