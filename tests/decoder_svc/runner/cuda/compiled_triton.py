"""Compiles our Triton kernels for a GPU that need not be present, in all variants that models and steps lead to.

`python -m tests.decoder_svc.runner.cuda.compiled_triton PART CAPABILITY=BYTES…` takes the shared memory that a program
may have for each capability, and prints the largest amount that a variant takes, in bytes. The part is "latents", which
are attention over latents, or "others".
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from decoder_svc.runner.cuda import (
    triton_attention,
    triton_layers,
    triton_penalties,
    triton_quantized,
    triton_recurrent,
    triton_splits,
    triton_writes,
)
from decoder_svc.runner.cuda.triton_attention import Tile, latent_tile_of, tile_of
from encoder_svc.vision import rotary_kernel, varlen_kernel
from lookonce.model.kernels import triton_rowwise
from lookonce.model.kernels.quantized_weight import CodeForm

_INT32_POINTERS = "block_table first_keys query_starts kv_lens mutual_starts mutual_stops".split()
_INT32_NUMBERS = "table_stride num_sequences wanted_each window".split()
_NUM_GROUPS = 4
# Element type, head dimension, whether a sequence has more than one new token, and whether keys and values are rounded;
# each takes seconds to compile.
_VARIANTS = (
    ("bf16", 64, False, False),
    ("bf16", 64, True, False),
    ("bf16", 64, False, True),
    ("fp32", 256, True, False),
    ("fp32", 256, True, True),
)
# Latents of Mistral Small 4 and Kimi K2.5: element type, heads, elements of a latent, and whether a step has many
# tokens. The last one is compiled for the last capability alone.
_LATENTS = (("bf16", 32, 256, False), ("bf16", 64, 512, True), ("fp32", 64, 512, False))
_ROTARY_DIM = 64


def main() -> None:
    """Compiles a part for all capabilities."""
    part, *given = sys.argv[1:]
    shared_bytes = {int(capability): int(most) for capability, most in (each.split("=") for each in given)}
    compile_part = {"latents": _compile_latents, "others": _compile_others}[part]
    compile_part(shared_bytes)


def _compile_latents(shared_bytes: Mapping[int, int]) -> None:
    for capability, available in shared_bytes.items():
        most = 0
        is_last = capability == [*shared_bytes][-1]
        for dtype, num_heads, value_dim, is_chunk in _LATENTS if is_last else _LATENTS[:-1]:
            size, num_counted = 4 if dtype == "fp32" else 2, 1000 if is_chunk else 1
            tile = latent_tile_of(value_dim, _ROTARY_DIM, size, num_heads, num_counted, available)
            source = _latent_source(dtype, num_heads, value_dim, is_chunk, tile)
            options = {"num_stages": tile.num_stages, "num_warps": tile.num_warps}
            compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
            ptx = compiled.asm["ptx"]
            assert "cubin" in compiled.asm
            assert "cp.async" in ptx, "no tile is loaded ahead"
            assert ("wgmma" in ptx) == (capability >= 90 and tile.num_rows == 64), "products of 64 rows"
            most = max(most, compiled.metadata.shared)
        print(most)


def _compile_others(shared_bytes: Mapping[int, int]) -> None:
    """Compiles every variant for the last capability, and those with matrix products for the others, too."""
    for capability, available in shared_bytes.items():
        most = 0
        for dtype, head_dim, is_chunk, is_rounded in _VARIANTS:
            tile = _tile(dtype, head_dim, is_chunk, available, is_rounded=is_rounded)
            source = _attend_source(
                dtype,
                head_dim,
                is_chunk,
                tile,
                has_window=head_dim in (64, 128),
                has_softcap=head_dim == 256,
                is_rounded=is_rounded,
            )
            options = {"num_stages": tile.num_stages}
            compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
            assert "cubin" in compiled.asm
            # Loads of single bytes take longer than reading whole keys from the device's memory.
            assert "ld.shared.b8" not in compiled.asm["ptx"]
            most = max(most, compiled.metadata.shared)
        others = (_join_source(), *_layer_sources(), *_tower_sources()) if capability == [*shared_bytes][-1] else ()
        for source in others:
            compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
            assert "cubin" in compiled.asm
            most = max(most, compiled.metadata.shared)
        for dtype, head_dim in (("bf16", 72), ("bf16", 80), ("fp32", 128)):
            source, num_stages = _window_source(dtype, head_dim, available)
            options = {"num_stages": num_stages}
            compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
            assert "cp.async" in compiled.asm["ptx"], "no tile is loaded ahead"
            most = max(most, compiled.metadata.shared)
        for source in _quantized_sources():
            compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
            ptx = compiled.asm["ptx"]
            assert "cubin" in compiled.asm
            assert "st.local" not in ptx, "registers do not suffice"
            if source.fn is triton_quantized._multiply:
                assert "cp.async" in ptx, "no tile is loaded ahead"
                # An H100 multiplies with weights in registers, which codes were expanded to.
                assert ("wgmma" in ptx) == (capability >= 90 and source.signature["inputs"] == "*bf16")
            most = max(most, compiled.metadata.shared)
        for source in _recurrent_sources():
            is_lone_warp = source.fn in (triton_recurrent._delta, triton_recurrent._scan)
            options = {"num_warps": triton_recurrent.NUM_WARPS} if is_lone_warp else {}
            compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
            assert "cubin" in compiled.asm
            assert "st.local" not in compiled.asm["ptx"], "registers do not suffice"
            most = max(most, compiled.metadata.shared)
        for dtype in ("bf16", "fp32"):
            _check_penalties(dtype, capability)
        print(most)


def _tile(dtype: str, head_dim: int, is_chunk: bool, shared_bytes: int, *, is_rounded: bool) -> Tile:
    key_bytes = head_dim * (4 if dtype == "fp32" else 2)
    return tile_of(key_bytes, _NUM_GROUPS, 1000 if is_chunk else 1, shared_bytes, is_rounded=is_rounded)


def _attend_source(
    dtype: str, head_dim: int, is_chunk: bool, tile: Tile, *, has_window: bool, has_softcap: bool, is_rounded: bool
) -> Any:
    heads = {"NUM_KV_HEADS": 4, "NUM_GROUPS": _NUM_GROUPS, "HEAD_DIM": head_dim, "VALUE_DIM": head_dim}
    constants = {
        **heads,
        "PADDED_DIM": head_dim,
        "PADDED_ROTARY": 0,
        "BLOCK_SIZE": 16,
        "NUM_ROWS": tile.num_rows,
        "NUM_KEYS": tile.num_keys,
        "PADDED_SEQUENCES": 128 if is_chunk else 64,
        "HAS_WINDOW": has_window,
        "IS_CHUNKED": head_dim == 128,
        "HAS_SOFTCAP": has_softcap,
        "HAS_MUTUAL": is_chunk,
        "IS_MUTUAL_BEYOND_WINDOW": is_chunk and has_window,
        "IS_ROUNDED": is_rounded,
    }
    return _attention(dtype, constants, is_rounded=is_rounded)


def _latent_source(dtype: str, num_heads: int, value_dim: int, is_chunk: bool, tile: Tile) -> Any:
    num_groups = min(num_heads, tile.num_rows)
    constants = {
        "NUM_KV_HEADS": num_heads // num_groups,
        "NUM_GROUPS": num_groups,
        "HEAD_DIM": value_dim + _ROTARY_DIM,
        "VALUE_DIM": value_dim,
        "PADDED_DIM": value_dim,
        "PADDED_ROTARY": _ROTARY_DIM,
        "BLOCK_SIZE": 16,
        "NUM_ROWS": tile.num_rows,
        "NUM_KEYS": tile.num_keys,
        "PADDED_SEQUENCES": 64,
        **dict.fromkeys(("HAS_WINDOW", "IS_CHUNKED", "HAS_SOFTCAP", "IS_MUTUAL_BEYOND_WINDOW", "IS_ROUNDED"), False),
        "HAS_MUTUAL": is_chunk,
    }
    return _attention(dtype, constants, is_rounded=False)


def _attention(dtype: str, constants: dict[str, Any], *, is_rounded: bool) -> Any:
    kernel = triton_attention._attend
    types = dict.fromkeys(("query", "output"), f"*{dtype}")
    types |= dict.fromkeys(("keys", "values"), "*i16" if is_rounded else f"*{dtype}")
    types |= dict.fromkeys(("key_scales", "value_scales"), "*fp32" if is_rounded else f"*{dtype}")
    types |= dict.fromkeys(("partial_sums", "partial_stats"), "*fp32")
    types |= dict.fromkeys(_INT32_POINTERS, "*i32") | dict.fromkeys(_INT32_NUMBERS, "i32")
    types |= {"scale": "fp32", "softcap": "fp32"}
    types |= dict.fromkeys(constants, "constexpr")
    # At run time Triton sees that addresses are multiples of 16. Only then are keys and values loaded ahead.
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if types[name].startswith("*")
    }
    signature = {name: types[name] for name in kernel.arg_names}
    return ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)


def _join_source() -> Any:
    constants = {"NUM_HEADS": 28, "HEAD_DIM": 80, "PADDED_DIM": 128, "TOKENS_EACH": 9, "PADDED_SEQUENCES": 64}
    constants["HAS_WINDOW"] = True
    kernel = triton_splits.join
    types = {"partial_sums": "*fp32", "partial_stats": "*fp32", "output": "*bf16"}
    types |= dict.fromkeys(_INT32_POINTERS, "*i32") | dict.fromkeys(_INT32_NUMBERS, "i32")
    types |= dict.fromkeys(constants, "constexpr")
    return ASTSource(fn=kernel, signature={name: types[name] for name in kernel.arg_names}, constexprs=constants)


def _window_source(dtype: str, head_dim: int, shared_bytes: int) -> tuple[Any, int]:
    """Returns the attention of towers, and its number of stages."""
    kernel = varlen_kernel._attend
    num_rows, num_keys, num_stages = varlen_kernel.tile_sizes(128 * (4 if dtype == "fp32" else 2), shared_bytes)
    constants = {"NUM_HEADS": 16, "GROUP": 1, "HEAD_DIM": head_dim, "PADDED_DIM": 128}
    constants |= {"NUM_ROWS": num_rows, "NUM_KEYS": num_keys}
    # Rotated queries and keys, and values in the merged projection.
    constants |= {"QUERY_TOKEN": 32 * head_dim, "KEYS_TOKEN": 32 * head_dim, "VALUES_TOKEN": 48 * head_dim}
    constants |= dict.fromkeys(("QUERY_HEAD", "KEYS_HEAD", "VALUES_HEAD"), head_dim)
    types = dict.fromkeys(kernel.arg_names, "i32") | {"bounds": "*i32", "scale": "fp32"}
    types |= dict.fromkeys(("query", "keys", "values", "output"), f"*{dtype}") | dict.fromkeys(constants, "constexpr")
    # PyTorch's memory begins at multiples of 16 bytes. Without that, nothing can be loaded ahead.
    is_aligned = {
        (index,): [["tt.divisibility", 16]] for index, name in enumerate(kernel.arg_names) if types[name][0] == "*"
    }
    signature = {name: types[name] for name in kernel.arg_names}
    return ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=is_aligned), num_stages


def _quantized_sources() -> Iterator[Any]:
    """Yields products with codes in tiles of few and of many rows, and what they need besides."""
    for dtype, form, num_rows in (
        ("bf16", CodeForm.INT4, 16), ("bf16", CodeForm.INT4, 64), ("bf16", CodeForm.INT8, 16),
        ("bf16", CodeForm.FLOAT8, 64), ("fp32", CodeForm.INT8, 16),
    ):  # fmt: skip
        constants = {"FORM": int(form), "GROUP": 128, "TILE": 64, "HAS_OFFSETS": form is CodeForm.INT4}
        types = dict.fromkeys(("codes",), "*i8") | dict.fromkeys(("scales", "offsets"), "*bf16")
        types |= dict.fromkeys(("inputs", "bias", "whole"), f"*{dtype}")
        tile = {"HAS_BIAS": True, "NUM_ROWS": num_rows, "NUM_OUTPUTS": 64}
        yield _aligned(triton_quantized._multiply, constants | tile, types | {"output": f"*{dtype}"})
        if num_rows == 16:
            tile = {"NUM_OUTPUTS": 64, "HALVES": 2 if form is CodeForm.INT4 else 1}
            yield _aligned(triton_quantized._expand, constants | tile, types)
    parts = {"parts": "*fp32", "bias": "*bf16", "output": "*bf16"}
    yield _aligned(triton_quantized._join, {"HAS_BIAS": True, "NUM_COLUMNS": 256}, parts)


def _recurrent_sources() -> Iterator[Any]:
    """Yields the kernels of recurrent layers, for a Qwen3.5 with heads of 128 numbers, an LFM2 and a Nemotron-H."""
    places = "sources targets first_tokens token_sequences first_snapshots snapshot_tokens snapshot_states".split()
    types = dict.fromkeys(places, "*i64") | dict.fromkeys(("inputs", "windows"), "*bf16")
    types |= dict.fromkeys(("filters", "bias", "convolved", "decay", "beta", "matrices"), "*fp32")
    types |= dict.fromkeys(("time_steps", "gates"), "*bf16")
    types |= dict.fromkeys(("rates", "skips", "step_bias"), "*fp32")
    blocks = {"BLOCK_TOKENS": 8, "BLOCK_CHANNELS": 128}
    # Those of a Nemotron-H are a part of each row of a projection.
    for row, num_channels, num_kept, has_bias, has_silu, output in (
        (8192, 8192, 3, 0, 1, "*fp32"), (2048, 2048, 2, 1, 0, "*bf16"), (10304, 6144, 3, 1, 1, "*fp32"),
    ):  # fmt: skip
        sizes = {"ROW": row, "NUM_CHANNELS": num_channels, "NUM_KEPT": num_kept}
        kinds = {"HAS_BIAS": has_bias, "HAS_SILU": has_silu}
        yield _recurrent(triton_recurrent._convolve, sizes | kinds | blocks, types | {"outputs": output})
        left = {"PADDED_KEPT": triton.next_power_of_2(num_kept), "BLOCK_CHANNELS": 128}
        yield _recurrent(triton_recurrent._leave_windows, sizes | left, types)
    heads = {"NUM_KEY_HEADS": 16, "NUM_VALUE_HEADS": 32, "KEY_DIM": 128, "VALUE_DIM": 128, "PADDED_KEYS": 128}
    columns: dict[str, Any] = {"NUM_COLUMNS": triton_recurrent.BLOCK_COLUMNS, "SCALE": 128**-0.5}
    yield _recurrent(triton_recurrent._delta, heads | columns, types | {"outputs": "*fp32"})
    heads = {"NUM_GROUPS": 8, "NUM_HEADS": 64, "STATE_SIZE": 128, "HEAD_DIM": 64, "PADDED_STATE": 128}
    columns = {"NUM_COLUMNS": triton_recurrent.BLOCK_COLUMNS, "STEPS_ROW": 10304, "GATES_ROW": 10304}
    yield _recurrent(triton_recurrent._scan, heads | columns, types | {"outputs": "*fp32"})


def _recurrent(kernel: Any, constants: dict[str, Any], types: dict[str, str]) -> Any:
    return _aligned(kernel, constants, {name: types[name] for name in kernel.arg_names if name in types})


def _aligned(kernel: Any, constants: dict[str, Any], types: dict[str, str]) -> Any:
    """Returns a kernel whose pointers are multiples of 16, and so are the inputs and bytes of a row of codes."""
    types = dict.fromkeys(kernel.arg_names, "i32") | types | dict.fromkeys(constants, "constexpr")
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if types[name].startswith("*") or name in ("num_inputs", "row_bytes")
    }
    signature = {name: types[name] for name in kernel.arg_names}
    return ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)


def _layer_sources() -> Iterator[Any]:
    """Yields the kernels between matrix products, for a Qwen3 with 4096 elements."""
    norm = {"SIZE": 4096, "PADDED_SIZE": 4096}
    for has_delta in (False, True):
        yield _source(triton_rowwise._add_norm, norm | {"HAS_DELTA": has_delta})
    heads = {"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HALF": 40, "PADDED_HALF": 64}
    for has_norms in (False, True):
        kinds = {"HAS_NORMS": has_norms, "IS_ROUNDED": False}
        yield _source(triton_layers._rotate_write, heads | kinds, slots="*i64")
        pools = dict.fromkeys(("keys", "values"), "*i8") | dict.fromkeys(("key_scales", "value_scales"), "*fp32")
        yield _source(triton_layers._rotate_write, heads | kinds | {"IS_ROUNDED": True}, slots="*i64", **pools)
    rows = dict.fromkeys(("key_row", "key_head", "value_row", "value_head"), "i32")
    sizes = {"NUM_KV_HEADS": 8, "HEAD_DIM": 80, "PADDED_DIM": 128, "VALUE_DIM": 80, "IS_ROUNDED": False}
    yield _source(triton_writes._write, sizes, slots="*i64", **rows)
    yield _source(triton_writes._write, sizes | {"VALUE_DIM": 64}, slots="*i64", **rows)
    yield _source(triton_writes._write, sizes | {"IS_ROUNDED": True}, slots="*i64", **rows, **pools)
    yield _source(triton_rowwise._gated, {"SIZE": 12_288, "NUM_COLUMNS": 1024})


def _tower_sources() -> Iterator[Any]:
    """Yields the kernels between matrix products, for the tower of Qwen2.5-VL."""
    yield _source(triton_rowwise._add_norm, {"SIZE": 1280, "PADDED_SIZE": 2048, "HAS_DELTA": True})
    yield _source(triton_rowwise._gated, {"SIZE": 3456, "NUM_COLUMNS": 1024})
    heads = {"ROW_SIZE": 3840, "NUM_ROTATED": 32, "HALF": 40, "PADDED_HALF": 64, "NUM_TOKENS": 16, "NUM_HEADS": 8}
    yield _source(rotary_kernel._rotate, heads, cosines="*fp32", sines="*fp32", num_tokens="i32")


def _check_penalties(dtype: str, capability: int) -> None:
    """Compiles the kernel for penalties. Its results have the last bit of separate operators only without fusing."""
    kernel = triton_penalties._penalise
    constants = {"VOCAB": 151_936, "NUM_COLUMNS": 1024, "IN_PROMPT": 1 << 30}
    types = {"logits": f"*{dtype}", "counts": "*i32", "slots": "*i64", "numbers": "*fp32", "output": "*fp32"}
    types |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernel, signature={name: types[name] for name in kernel.arg_names}, constexprs=constants)
    options = {"enable_fp_fusion": False}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert "cubin" in compiled.asm
    assert "fma.rn.f32" not in compiled.asm["ptx"]
    assert "div.full.f32" not in compiled.asm["ptx"]


def _source(kernel: Any, constants: dict[str, int], **types: str) -> Any:
    signature = dict.fromkeys(kernel.arg_names, "*bf16") | {"epsilon": "fp32"} | types
    signature |= dict.fromkeys(constants, "constexpr")
    return ASTSource(fn=kernel, signature={name: signature[name] for name in kernel.arg_names}, constexprs=constants)


if __name__ == "__main__":
    main()
