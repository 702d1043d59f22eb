"""Writes model folders with quantized weights, as the tools of the field write them: a second view of their layouts.

Codes are packed bit by bit here, and weights are computed from them by the formula of each format's description.
"""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

# Column of each four bits of an AWQ word, from the lowest.
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
_GATE_UP = ("gate_proj", "up_proj")
_LINEAR = re.compile(r"\.layers\..*(proj|fc1|fc2)\.weight$|\blm_head\.weight$")
_NOT_TEXT = re.compile(r"vision|visual|image_tower|video_tower|\bvit\b|audio|perceiver|qwen2_model|projector")


@dataclass(frozen=True, slots=True)
class StoredForm:
    """A format: the entry of config.json, and the tensors of a layer with the weight that they stand for."""

    entry: Mapping[str, Any]
    # (weight float32 [outputs, inputs], seed) -> tensors by the last part of their names, and the weight.
    store: Callable[[Tensor, int], tuple[dict[str, Tensor], Tensor]]
    # Whether layers have codes after loading.
    keeps_codes: bool = field(default=True)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Packs unsigned codes `[rows, codes]` into int32 words `[rows, words]`, from the lowest bits of each word."""
    rows, count = codes.shape
    words = np.zeros((rows, -(-count * bits // 32)), dtype=np.uint32)
    for index in range(count):
        word, shift = divmod(index * bits, 32)
        words[:, word] |= codes[:, index].numpy().astype(np.uint32) << np.uint32(shift)
    return torch.from_numpy(words.view(np.int32))


def _groups(weight: Tensor, size: int) -> Tensor:
    """Returns for each input the number of its group."""
    return torch.arange(weight.shape[1]) // size


def _integers(weight: Tensor, bits: int, group: Tensor, *, is_symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Rounds a weight: unsigned codes, scales in float16, and zero points `[outputs, groups]`."""
    most, count = (1 << bits) - 1, int(group.max()) + 1
    scales, zeros = (
        torch.empty(len(weight), count, dtype=torch.float16),
        torch.empty(len(weight), count, dtype=torch.int64),
    )
    codes = torch.empty(weight.shape, dtype=torch.int64)
    for index in range(count):
        part = weight[:, group == index]
        low, high = part.amin(dim=1).clamp(max=-1e-3), part.amax(dim=1).clamp(min=1e-3)
        if is_symmetric:
            scales[:, index] = (torch.maximum(-low, high) * 2 / most).half()
            zeros[:, index] = 1 << bits - 1
        else:
            scales[:, index] = ((high - low) / most).half()
            zeros[:, index] = (-low / scales[:, index].float()).round().clamp(1, most).long()
        steps = part / scales[:, index, None].float()
        codes[:, group == index] = (steps.round().long() + zeros[:, index, None]).clamp(0, most)
    return codes, scales, zeros


def _whole(codes: Tensor, scales: Tensor, zeros: Tensor, group: Tensor) -> Tensor:
    return ((codes - zeros[:, group]).double() * scales.double()[:, group]).float()


def _gptq(bits: int, size: int, *, is_second: bool = False, in_order: bool = True) -> StoredForm:
    def store(weight: Tensor, seed: int) -> tuple[dict[str, Tensor], Tensor]:
        group = _groups(weight, size)
        if not in_order:
            group = group[torch.randperm(len(group), generator=torch.Generator().manual_seed(seed))]
        codes, scales, zeros = _integers(weight, bits, group, is_symmetric=False)
        tensors = {
            "qweight": pack(codes, bits).T.contiguous(),
            "qzeros": pack(zeros.T - (0 if is_second else 1), bits),
            "scales": scales.T.contiguous(),
            "g_idx": group.int(),
        }
        return tensors, _whole(codes, scales, zeros, group)

    name = "gptq_v2" if is_second else "gptq"
    entry = {
        "quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": not in_order, "sym": False,
        "checkpoint_format": name,
    }  # fmt: skip
    return StoredForm(entry, store, keeps_codes=in_order)


def _awq(size: int) -> StoredForm:
    def store(weight: Tensor, seed: int) -> tuple[dict[str, Tensor], Tensor]:
        group = _groups(weight, size)
        codes, scales, zeros = _integers(weight, 4, group, is_symmetric=False)

        def packed(rows: Tensor) -> Tensor:
            return pack(rows.unflatten(1, (-1, 8))[:, :, list(_AWQ_COLUMNS)].flatten(1), 4)

        tensors = {"qweight": packed(codes.T), "qzeros": packed(zeros.T), "scales": scales.T.contiguous()}
        return tensors, _whole(codes, scales, zeros, group)

    entry = {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm"}
    return StoredForm(entry, store)


def _compressed(layout: str, weights: Mapping[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "symmetric": True, **weights}}
    return {
        "quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "quantization_status": "compressed",
    }  # fmt: skip


def _packed(bits: int, size: int, *, is_symmetric: bool) -> StoredForm:
    def store(weight: Tensor, seed: int) -> tuple[dict[str, Tensor], Tensor]:
        group = _groups(weight, size)
        codes, scales, zeros = _integers(weight, bits, group, is_symmetric=is_symmetric)
        tensors = {
            "weight_packed": pack(codes, bits),
            "weight_scale": scales.bfloat16(),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not is_symmetric:
            tensors["weight_zero_point"] = pack(zeros.T, bits).T.contiguous()
        return tensors, _whole(codes, scales.bfloat16(), zeros, group)

    described = {"num_bits": bits, "strategy": "group", "group_size": size, "symmetric": is_symmetric}
    return StoredForm(_compressed("pack-quantized", described), store)


def _int8() -> StoredForm:
    def store(weight: Tensor, seed: int) -> tuple[dict[str, Tensor], Tensor]:
        scales = (weight.abs().amax(dim=1, keepdim=True) / 127).clamp(min=1e-6).bfloat16()
        codes = (weight / scales.float()).round().clamp(-128, 127)
        tensors = {"weight": codes.to(torch.int8), "weight_scale": scales}
        return tensors, (codes.double() * scales.double()).float()

    return StoredForm(_compressed("int-quantized", {"strategy": "channel"}), store)


def _float8(scale_of: Callable[[Tensor], Tensor], name: str, entry: Mapping[str, Any]) -> StoredForm:
    """`scale_of` returns scales `[outputs, inputs]` of a weight's absolute values."""

    def store(weight: Tensor, seed: int) -> tuple[dict[str, Tensor], Tensor]:
        scales = (scale_of(weight.abs()) / 448).clamp(min=1e-6)
        block = entry.get("weight_block_size")
        wide = scales
        if block:
            wide = scales.repeat_interleave(block[0], 0)[: len(weight)].repeat_interleave(block[1], 1)
            wide = wide[:, : weight.shape[1]]
        codes = (weight / wide).to(torch.float8_e4m3fn)
        return {"weight": codes, name: scales}, (codes.double() * wide.double()).float()

    return StoredForm(entry, store)


def _float8_blocks(size: int) -> StoredForm:
    def scale_of(sizes: Tensor) -> Tensor:
        rows, columns = -sizes.shape[0] % size, -sizes.shape[1] % size
        blocks = torch.nn.functional.pad(sizes, (0, columns, 0, rows)).unflatten(0, (-1, size)).unflatten(2, (-1, size))
        return blocks.amax(dim=(1, 3))

    entry = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [size, size]}
    return _float8(scale_of, "weight_scale_inv", entry)


FORMS: dict[str, StoredForm] = {
    "gptq-4": _gptq(4, 32),
    "gptq-8": _gptq(8, 32),
    "gptq-v2": _gptq(4, 32, is_second=True),
    "gptq-act-order": _gptq(4, 32, in_order=False),
    "awq": _awq(32),
    "compressed-int4": _packed(4, 32, is_symmetric=True),
    "compressed-int4-zeros": _packed(4, 16, is_symmetric=False),
    "compressed-int8-packed": _packed(8, 32, is_symmetric=True),
    "compressed-int8": _int8(),
    "compressed-float8": _float8(
        lambda sizes: sizes.amax(dim=1, keepdim=True),
        "weight_scale",
        _compressed("float-quantized", {"type": "float", "strategy": "channel"}),
    ),
    "fp8-tensor": _float8(lambda sizes: sizes.amax().reshape(1), "weight_scale_inv", {"quant_method": "fp8"}),
    "fp8-block": _float8_blocks(32),
}
# Formats with groups as large as published ones have, or half as large, so that they divide 576 inputs.
PUBLISHED_FORMS: dict[str, StoredForm] = {
    "AWQ": _awq(64),
    "GPTQ": _gptq(4, 64),
    "W4A16": _packed(4, 64, is_symmetric=True),
    "W8A16": _packed(8, 64, is_symmetric=True),
    "W8A8": _int8(),
    "float8": _float8_blocks(128),
}


def store_quantized(
    folder: pathlib.Path,
    form: StoredForm,
    whole_folder: pathlib.Path | None = None,
    *,
    vision: bool = False,
    others: Collection[str] = (),
    has_whole_experts: bool = False,
) -> list[str]:
    """Stores the linear layers of the language model and its head, or of the vision tower; returns their names.

    `others` are names of layers that are stored as well. With `has_whole_experts`, merged experts stay as they are.

    The weights that they stand for are written to `whole_folder`, which holds the same model.
    """
    (file,) = folder.glob("*.safetensors")
    tensors, whole = load_file(file), {}
    layers = dict(tensors) if has_whole_experts else _with_single_experts(tensors)
    names = [
        name.removesuffix(".weight")
        for name, tensor in layers.items()
        if name.removesuffix(".weight") in others
        or (
            _LINEAR.search(name)
            and tensor.ndim == 2
            and len(tensor) % 8 == 0
            and bool(_NOT_TEXT.search(name)) == vision
        )
    ]
    for seed, name in enumerate(names):
        weight = layers.pop(f"{name}.weight")
        parts, stored = form.store(weight.float(), seed)
        layers |= {f"{name}.{part}": tensor.contiguous() for part, tensor in parts.items()}
        whole[f"{name}.weight"] = stored.to(weight.dtype)
    save_file(layers, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": form.entry}))
    if whole_folder is not None:
        stored_whole = tensors | whole
        merged = stored_whole if has_whole_experts else _with_merged_experts(stored_whole)
        save_file(merged, whole_folder / file.name, metadata={"format": "pt"})
    return names


def _with_single_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Divides merged experts, whichever size comes first, into layers [outputs, inputs], as tools that quantize do."""
    found = {}
    for name, tensor in tensors.items():
        prefix, _, part = name.rpartition(".experts.")
        if tensor.ndim != 3 or part not in ("gate_up_proj", "down_proj"):
            found[name] = tensor
            continue
        is_transposed = are_transposed(tensors, prefix)
        for number, expert in enumerate(tensor.transpose(1, 2).contiguous() if is_transposed else tensor):
            layers = {"down_proj": expert} if part == "down_proj" else dict(zip(_GATE_UP, expert.chunk(2), strict=True))
            found |= {f"{prefix}.experts.{number}.{layer}.weight": weight for layer, weight in layers.items()}
    return found


def _with_merged_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Writes the weights of single layers into merged experts, where there are both."""
    merged = {}
    for name in [name for name in tensors if name.endswith((".experts.gate_up_proj", ".experts.down_proj"))]:
        prefix, _, part = name.rpartition(".")
        layers = _GATE_UP if part == "gate_up_proj" else ("down_proj",)
        experts = range(len(tensors[name]))
        merged[name] = torch.stack(
            [torch.cat([tensors.pop(f"{prefix}.{number}.{layer}.weight") for layer in layers]) for number in experts]
        )
        if are_transposed(tensors, prefix.removesuffix(".experts")):
            merged[name] = merged[name].transpose(1, 2).contiguous()
    return tensors | merged


def are_transposed(tensors: Mapping[str, Tensor], prefix: str) -> bool:
    """Whether merged experts are [experts, inputs, outputs], by the size that both products share."""
    gate_up, down = (tensors[f"{prefix}.experts.{part}"] for part in ("gate_up_proj", "down_proj"))
    return bool(gate_up.shape[2] != down.shape[1])
