"""The entry of config.json about quantized weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lookonce.errors import ModelFolderError
from lookonce.model.quantized_folder.storage import Method, Storage

COMPRESSED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}


def storage(entry: Any) -> Storage | None:
    return Storage.of({"model_type": "llava", "quantization_config": entry})


def test_whole_weights_have_no_entry() -> None:
    assert Storage.of({"model_type": "llava", "text_config": {"hidden_size": 8}}) is None
    assert storage(None) is None


def test_the_entry_may_be_in_the_language_models_part() -> None:
    found = Storage.of({"text_config": {"quantization_config": {"quant_method": "awq", "bits": 4}}})
    assert found == Storage(Method.AWQ)


def test_group_sizes_and_blocks_are_those_of_all_layers() -> None:
    groups = {
        "group_0": {"weights": {"num_bits": 4, "group_size": 128}},
        "group_1": {"weights": {"num_bits": 8, "group_size": -1, "block_structure": [128, 64]}},
        "group_2": {"weights": None},
    }
    found = storage({**COMPRESSED, "config_groups": groups})
    assert found == Storage(Method.COMPRESSED_TENSORS, group_sizes=(128,), block_shapes=((128, 64),))
    blocks = {"group_0": {"weights": {"block_structure": "128x64"}}}
    assert storage({**COMPRESSED, "config_groups": blocks}) == replace(found, group_sizes=())
    assert storage({"quant_method": "fp8", "weight_block_size": [128, 128]}) == Storage(
        Method.FP8, block_shapes=((128, 128),)
    )


@pytest.mark.parametrize(("layout", "shift"), [({}, 1), ({"checkpoint_format": "gptq"}, 1), ({"format": "gptq_v2"}, 0)])
def test_the_first_version_of_gptq_stores_zero_points_less_one(layout: dict[str, str], shift: int) -> None:
    found = storage({"quant_method": "gptq", "bits": 4, "group_size": 128, **layout})
    assert found == Storage(Method.GPTQ, zero_shift=shift, group_sizes=(128,))


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "'modelopt'"),
        ({"bits": 4}, "None"),
        ({"quant_method": ["awq"]}, "['awq']"),
        ({**COMPRESSED, "format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized'"),
        ({**COMPRESSED, "format": 4}, "format 4"),
        ({**COMPRESSED, "config_groups": {"a": {"format": "mxfp4-pack-quantized"}}}, "'mxfp4-pack-quantized'"),
        ({**COMPRESSED, "transform_config": {"config_groups": {}}}, "transform_config"),
        ({**COMPRESSED, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({"quant_method": "gptq", "bits": 5, "format": "gptq_p"}, "format 'gptq_p'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv'"),
        ({"quant_method": "awq", "bits": 4, "format": "llm-awq"}, "format 'llm-awq'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'"),
    ],
)
def test_other_forms_are_refused_by_name_with_the_way_out(entry: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelFolderError) as caught:
        storage(entry)
    assert named in str(caught.value)
    assert "--quantize" in str(caught.value)


@pytest.mark.parametrize(
    "entry",
    [
        {"quant_method": "awq", "group_size": 0},
        {"quant_method": "awq", "group_size": "128"},
        {"quant_method": "awq", "group_size": True},
        {"quant_method": "fp8", "weight_block_size": 128},
        {"quant_method": "fp8", "weight_block_size": [128, 0]},
        {"quant_method": "fp8", "weight_block_size": "128x0"},
        {**COMPRESSED, "config_groups": [1]},
        {**COMPRESSED, "config_groups": {"group_0": 1}},
        "awq",
    ],
    ids=str,
)
def test_an_entry_of_another_shape_is_refused(entry: Any) -> None:
    with pytest.raises(ModelFolderError, match="quantization_config"):
        storage(entry)


def test_formats_may_be_written_in_capitals() -> None:
    assert storage({"quant_method": "awq", "version": "GEMM"}) == Storage(Method.AWQ)


def test_groups_of_layers_are_read_from_compressed_tensors_alone() -> None:
    assert storage({"quant_method": "awq", "config_groups": [1]}) == Storage(Method.AWQ)


def test_dense_weights_without_sparsity_are_served() -> None:
    assert storage({**COMPRESSED, "sparsity_config": {"format": "dense"}, "kv_cache_scheme": {"num_bits": 8}})
