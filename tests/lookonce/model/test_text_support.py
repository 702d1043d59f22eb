"""Text models that would not be served exactly are refused with the reason, before any weight is read."""

from __future__ import annotations

import importlib
import json
import math
import pathlib
import re
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import transformers

from lookonce.errors import ModelFolderError
from lookonce.model.family_model import FamilyModel
from lookonce.model.model_folder import ModelFolder
from lookonce.model.text_support import SINK_MODEL_TYPES
from tests import tiny_models
from tests.tiny_families import FAMILIES

BUILDERS: dict[str, Callable[[pathlib.Path], pathlib.Path]] = {
    **{name: module.build for name, module in FAMILIES.items()},
    **tiny_models.BUILDERS,
}
# Fields without which the text models below cannot be read as a configuration.
SMALL = {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 1}
XDROPE = {"rope_type": "dynamic", "rope_theta": 4.0, "factor": 1.0, "alpha": 2.0, "mrope_section": [2, 2, 2, 2]}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 1024}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, pathlib.Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        name: BUILDERS[name](root / name)
        for name in ("llava_clip", "gemma3", "gemma4", "hunyuan_vl", "internvl", "mistral4", "qwen2_vl", "llava_next")
    }


@pytest.fixture
def edited(folders: Mapping[str, pathlib.Path], tmp_path: pathlib.Path) -> Callable[..., ModelFolder]:
    """Returns a function that copies a family's folder and changes fields of its text model.

    With `replaced` the text model has only these fields. The weight files are garbage.
    """

    def edit(name: str, fields: Mapping[str, Any], *, replaced: bool = False) -> ModelFolder:
        path = tmp_path / name
        shutil.copytree(folders[name], path)
        config = json.loads((path / "config.json").read_text())
        config["text_config"] = {**({} if replaced else config["text_config"]), **fields}
        (path / "config.json").write_text(json.dumps(config))
        folder = ModelFolder.open(path)
        for file in folder.weight_files:
            file.write_bytes(b"never read")
        return folder

    return edit


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_every_tiny_family_is_accepted(name: str, tmp_path: pathlib.Path) -> None:
    FamilyModel.load(ModelFolder.open(BUILDERS[name](tmp_path / name)))


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        ("internvl", {"layer_types": ["full_attention", "linear_attention", "conv"]}, "'linear_attention' (layer 1)"),
        ("internvl", {"layer_types": ["full_attention", "full_attention", "conv"]}, "'conv' (layer 2)"),
        ("internvl", {"layer_types": ["mamba", "full_attention", "full_attention"]}, "'linear_attention' (layer 0)"),
        ("qwen2_vl", {"layer_types": ["chunked_attention"] * 3}, "'chunked_attention' (layer 0)"),
        ("internvl", {"layer_types": ["attends_somehow"] * 3}, "transformers cannot read"),
        ("llava_clip", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ("llava_clip", {"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        (
            "gemma3",
            {"rope_parameters": {"full_attention": {"rope_type": "dynamic", "factor": 2.0}, "sliding_attention": {}}},
            "rope type 'dynamic' in full_attention layers",
        ),
        (
            "llava_next",
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}},
            "rope type 'longrope'",
        ),
        ("hunyuan_vl", {"rope_parameters": {**XDROPE, "alpha": None}}, "rope type 'dynamic'"),
        ("hunyuan_vl", {"rope_parameters": {**XDROPE, "mrope_section": [2, 3, 3]}}, "3 rotary axes (mrope_section)"),
        ("llava_clip", {"rope_parameters": {**XDROPE, "mrope_section": None}}, "rope type 'dynamic'"),
        ("llava_clip", {"rope_parameters": {"rope_type": "made_up"}}, "only default, linear, llama3"),
        ("llava_clip", {"is_encoder_decoder": True}, "an encoder and a decoder (llama: is_encoder_decoder)"),
        ("llava_clip", {"add_cross_attention": True}, "cross-attention"),
        ("llava_clip", {"hidden_size_per_layer_input": 8}, "per-layer inputs"),
        ("llava_clip", {"num_kv_shared_layers": 1}, "share their keys"),
        ("llava_clip", {"kv_lora_rank": 8}, "multi-head latent attention"),
        ("mistral4", {"kv_lora_rank": 0}, "text_config.kv_lora_rank must be a number from 1 to"),
        ("mistral4", {"qk_rope_head_dim": 1 << 40}, "text_config.qk_rope_head_dim must be a number from 1 to"),
        ("mistral4", {"v_head_dim": None}, "v_head_dim in config.json must be a number ≥ 1, not None"),
        ("mistral4", {"num_key_value_heads": 2}, "num_key_value_heads = 2, which must be the number of heads, 4"),
        ("mistral4", {"rope_parameters": YARN}, "rope_parameters.llama_4_scaling_beta in config.json must be a number"),
        (
            "mistral4",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "llama_4_scaling_beta": 0.1}},
            "rope_parameters.original_max_position_embeddings in config.json must be a number > 0, not None",
        ),
        ("gemma3", {"use_bidirectional_attention": True}, "see later tokens"),
        ("gemma4", {"use_bidirectional_attention": "all"}, "see later tokens"),
        ("gemma4", {"per_layer_config": {"0": {"head_dim": 32}}}, "layers of one type with different numbers or sizes"),
        ("gemma4", {"per_layer_config": {"2": {"head_dim": 1 << 30}}}, "per_layer_config.2.head_dim must be a number"),
        ("llava_clip", {"num_attention_heads": "4"}, "transformers cannot read"),
        ("gemma3", {"sliding_window": None}, "sliding_window in config.json must be a number ≥ 1, not None"),
        ("internvl", {"use_sliding_window": True, "sliding_window": None}, "not None"),
        ("llava_next", {"sliding_window": 0}, "not 0"),
    ],
)
def test_a_text_model_that_is_not_served_exactly_is_refused_with_the_reason(
    name: str, fields: Mapping[str, Any], reason: str, edited: Callable[..., ModelFolder]
) -> None:
    with pytest.raises(ModelFolderError, match=re.escape(reason)):
        FamilyModel.load(edited(name, fields))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model_type": "mllama_text_model", "cross_attention_layers": [1]}, "cross_attention_layers is [1]"),
        ({"model_type": "gpt_oss", "num_attention_heads": 4, "num_key_value_heads": 2}, "attention sinks"),
        # Its own family knows which tokens layers look up, and another one does not.
        ({"model_type": "gemma3n_text", "num_hidden_layers": 5}, "per-layer inputs"),
        ({"model_type": "gemma4_text", "num_hidden_layers": 6, "num_key_value_heads": 2}, "layers of different shapes"),
        ({"model_type": "t5"}, "an encoder and a decoder"),
        # Its layers have another form of latent attention.
        ({"model_type": "minicpm3", "num_attention_heads": 4}, "compressed keys and values"),
        (
            {"model_type": "gpt_neox", "num_attention_heads": 4},
            "(gpt_neox) has no num_key_value_heads in its configuration, which sizes the KV cache, so text models of "
            "type 'gpt_neox' are not served",
        ),
        ({"model_type": "opt", "num_attention_heads": 4}, "no num_key_value_heads"),
        ({"model_type": "rwkv"}, "no num_attention_heads"),
        (
            {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 0},
            "text_config.num_key_value_heads must be a number from 1 to",
        ),
        (
            {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 3},
            "num_attention_heads = 4, which num_key_value_heads = 3 does not divide",
        ),
        (
            {
                "model_type": "qwen3_5_text",
                "layer_types": ["linear_attention", "full_attention"],
                "linear_num_value_heads": 6,
                "linear_num_key_heads": 4,
            },
            "linear_num_value_heads = 6, which linear_num_key_heads = 4 does not divide",
        ),
        ({"model_type": "jamba"}, "'linear_attention' (layer 0)"),
        ({"model_type": "llama4_text", "attention_chunk_size": None}, "must be a number ≥ 1, not None"),
        ({"model_type": "llama4_text", "attention_chunk_size": 0}, "must be a number ≥ 1, not 0"),
        ({"model_type": "llama4_text", "floor_scale": 0}, "floor_scale in config.json must be a number > 0, not 0"),
        ({"model_type": "llama4_text", "floor_scale": -3}, "floor_scale in config.json must be a number > 0, not -3"),
        ({"model_type": "llama4_text", "attn_scale": math.inf}, "attn_scale in config.json must be a number, not inf"),
        (
            {"model_type": "llama4_text", "layer_types": ["sliding_attention"] * 2},
            "layer of type 'sliding_attention' (layer 0), but only full_attention and chunked_attention are served",
        ),
    ],
)
def test_text_models_of_other_kinds_are_refused(
    fields: Mapping[str, Any], reason: str, edited: Callable[..., ModelFolder]
) -> None:
    with pytest.raises(ModelFolderError, match=re.escape(reason)):
        FamilyModel.load(edited("llava_clip", {**SMALL, **fields}, replaced=True))


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("llava_clip", {"rope_parameters": YARN}),
        (
            "llava_clip",
            {"rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        ),
        # The form in folders from before transformers 5.
        ("qwen2_vl", {"rope_parameters": None, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}),
        # The form in published folders.
        (
            "hunyuan_vl",
            {
                "rope_parameters": None,
                "rope_theta": 10000.0,
                "rope_scaling": {"type": "xdrope", "alpha": 1000.0, "factor": 1.0, "xdrope_section": [2, 2, 2, 2]},
            },
        ),
        (
            "gemma3",
            {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {}}},
        ),
        ("internvl", {"use_sliding_window": False, "sliding_window": 32}),
        # The form in published folders.
        ("gemma4", {"per_layer_config": None, "global_head_dim": 32, "num_global_key_value_heads": None}),
        ("internvl", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1, "layer_types": None}),
        ("llava_next", {"sliding_window": 32}),
    ],
)
def test_other_variants_are_accepted(name: str, fields: Mapping[str, Any], edited: Callable[..., ModelFolder]) -> None:
    FamilyModel.load(edited(name, fields))


def test_all_text_models_with_sinks_are_known() -> None:
    """Models with sinks pass `s_aux` to the attention function, which transformers' sources show."""
    models = pathlib.Path(str(importlib.import_module("transformers.models").__file__)).parent
    found = {file.parent.name for file in models.glob("*/modeling_*.py") if "s_aux=" in file.read_text("utf-8")}
    assert found, f"transformers {transformers.__version__} names them otherwise"
    assert found <= SINK_MODEL_TYPES
