"""The layers of a quantized folder are found in each family's model."""

from __future__ import annotations

import json
import pathlib

import pytest
import torch
from safetensors.torch import load_file, save_file

from lookonce.errors import ModelFolderError
from lookonce.local.half_check import check_half
from lookonce.model.family_model import FamilyModel
from lookonce.model.folder_fingerprint import folder_fingerprint
from lookonce.model.half_model import Half, load_text_half, load_vision_half
from lookonce.model.kernels.quantized_experts import QuantizedExperts
from lookonce.model.kernels.quantized_weight import QuantizedLinear
from lookonce.model.model_folder import ModelFolder
from tests.quantized_folders import FORMS, store_quantized
from tests.tiny_families import FAMILIES


def built(family: str, tmp_path: pathlib.Path, form: str = "awq", *, vision: bool = False) -> list[str]:
    """Builds `stored` and `whole`; returns the names of the layers that are stored as codes."""
    for name in ("stored", "whole"):
        (tmp_path / name).mkdir()
        FAMILIES[family].build(tmp_path / name)
    return store_quantized(tmp_path / "stored", FORMS[form], tmp_path / "whole", vision=vision)


# Families whose quantized experts are refused, with the reason.
REFUSED = {
    "ernie4_5_vl_moe": "is merged with others",
    "muse_spark": "MuseSparkExperts is none of the MLPs that the kernels compute",
}
# Layers of a file that predict further tokens, which are not loaded.
NOT_LOADED = {"step3p7": ".layers.4."}


# Names in the file are those of transformers 4 in some families.
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_each_stored_layer_of_a_family_is_found(family: str, tmp_path: pathlib.Path) -> None:
    stored_names = built(family, tmp_path, "compressed-int8")
    names = [name for name in stored_names if NOT_LOADED.get(family, "nowhere") not in name]
    assert (len(names) < len(stored_names)) == (family in NOT_LOADED)
    if family in REFUSED:
        with pytest.raises(ModelFolderError, match=f"{REFUSED[family]}; use the unquantized model"):
            load_text_half(tmp_path / "stored", torch.float32, "eager", keep_codes=True)
        return
    found = load_text_half(tmp_path / "stored", torch.float32, "eager", keep_codes=True)
    layers = [module for module in found.modules() if isinstance(module, QuantizedLinear)]
    mixtures = [module for module in found.modules() if isinstance(module, QuantizedExperts)]
    num_expert_layers = sum(module.weights.num_experts * len(module.weights.parts) for module in mixtures)
    assert len(layers) + num_expert_layers == len(names)
    assert bool(mixtures) == any(".experts." in name for name in names)
    whole = load_text_half(tmp_path / "whole", torch.float32, "eager")
    stored = load_text_half(tmp_path / "stored", torch.float32, "eager")
    state = stored.state_dict()
    assert state.keys() == whole.state_dict().keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in whole.state_dict().items())


def test_an_encoder_computes_with_the_weights_that_codes_stand_for(tmp_path: pathlib.Path) -> None:
    assert built("llava_clip", tmp_path, "compressed-int8", vision=True)
    stored, whole = (load_vision_half(tmp_path / name, torch.float32) for name in ("stored", "whole"))
    state = stored.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in whole.state_dict().items())


def test_rows_of_a_quantized_language_model_are_those_of_the_whole_one(tmp_path: pathlib.Path) -> None:
    built("qwen2_5_vl", tmp_path)
    found = []
    for name in ("stored", "whole"):
        folder = ModelFolder.open(tmp_path / name)
        found.append(folder_fingerprint(folder, FamilyModel.load(folder)))
    assert found[0] == found[1]


def test_a_check_counts_layers_by_form_without_reading_weights(tmp_path: pathlib.Path) -> None:
    names = built("qwen2_5_vl", tmp_path)
    folder = ModelFolder.open(tmp_path / "stored")
    config = FamilyModel.load(folder).source.config
    text, vision = (check_half(folder, config, half) for half in (Half.TEXT, Half.VISION))
    assert text.quantized == {"int4 with a scale for 32 inputs": len(names)}
    assert not vision.quantized
    whole = ModelFolder.open(tmp_path / "whole")
    assert text.num_bytes < check_half(whole, config, Half.TEXT).num_bytes


def edit(folder: pathlib.Path, layer: str, **changes: torch.Tensor | None) -> None:
    """Replaces or removes tensors of a layer."""
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    for part, tensor in changes.items():
        if tensor is None:
            del tensors[f"{layer}.{part}"]
        else:
            tensors[f"{layer}.{part}"] = tensor
    save_file(tensors, file, metadata={"format": "pt"})


def test_a_layer_that_is_stored_twice_is_refused(tmp_path: pathlib.Path) -> None:
    layer = built("qwen2_5_vl", tmp_path)[0]
    edit(tmp_path / "stored", layer, weight=torch.zeros(8, 8))
    with pytest.raises(ModelFolderError, match=f"{layer} cannot be loaded: weight is not known for awq"):
        load_text_half(tmp_path / "stored", torch.float32, "eager")


def test_a_layer_without_its_codes_is_refused_by_load_and_check(tmp_path: pathlib.Path) -> None:
    layer = built("qwen2_5_vl", tmp_path)[0]
    edit(tmp_path / "stored", layer, qweight=None)
    folder = ModelFolder.open(tmp_path / "stored")
    with pytest.raises(ModelFolderError, match="do not fit the configuration"):
        load_text_half(folder.path, torch.float32, "eager")
    with pytest.raises(ModelFolderError, match="do not fit the configuration"):
        check_half(folder, FamilyModel.load(folder).source.config, Half.TEXT)


def test_an_embedding_table_of_codes_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    built("qwen2_5_vl", tmp_path, "compressed-int8")
    edit(tmp_path / "stored", "model.language_model.embed_tokens", weight_scale=torch.ones(8, 1))
    with pytest.raises(ModelFolderError, match=r"embed_tokens is not served: it is a Embedding, not a linear layer"):
        load_text_half(tmp_path / "stored", torch.float32, "eager")


def test_codes_of_experts_that_the_kernels_do_not_compute_are_refused_by_load_and_check(tmp_path: pathlib.Path) -> None:
    built("qwen3_vl_moe", tmp_path)
    file = tmp_path / "stored" / "config.json"
    config = json.loads(file.read_text())
    config["text_config"]["hidden_act"] = "tanh"
    file.write_text(json.dumps(config))
    folder = ModelFolder.open(tmp_path / "stored")
    reason = "Qwen3VLMoeTextExperts is none of the MLPs that the kernels compute; use the unquantized model"
    with pytest.raises(ModelFolderError, match=reason):
        load_text_half(folder.path, torch.float32, "eager")
    with pytest.raises(ModelFolderError, match=reason):
        check_half(folder, FamilyModel.load(folder).source.config, Half.TEXT)


@pytest.mark.parametrize("family", ["qwen3_vl_moe", "nemotron_h_omni"])
def test_a_check_counts_the_layers_of_experts(family: str, tmp_path: pathlib.Path) -> None:
    names = built(family, tmp_path, "compressed-int8")
    folder = ModelFolder.open(tmp_path / "stored")
    text = check_half(folder, FamilyModel.load(folder).source.config, Half.TEXT)
    assert text.quantized == {"int8 with a scale for each row": len(names)}


def test_codes_without_an_entry_in_the_configuration_do_not_fit(tmp_path: pathlib.Path) -> None:
    built("qwen2_5_vl", tmp_path)
    file = tmp_path / "stored" / "config.json"
    config = json.loads(file.read_text())
    del config["quantization_config"]
    file.write_text(json.dumps(config))
    with pytest.raises(ModelFolderError, match="do not fit the configuration"):
        load_text_half(tmp_path / "stored", torch.float32, "eager")


def test_a_head_that_is_tied_and_quantized_is_told(tmp_path: pathlib.Path) -> None:
    assert "lm_head" in built("qwen2_vl", tmp_path)
    path = tmp_path / "stored" / "config.json"
    config = json.loads(path.read_text())
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = True
    path.write_text(json.dumps(config))
    reason = "the quantized layer lm_head is not served: config.json ties its weight to the embedding table"
    folder = ModelFolder.open(tmp_path / "stored")
    with pytest.raises(ModelFolderError, match=reason):
        check_half(folder, FamilyModel.load(folder).source.config, Half.TEXT)
    with pytest.raises(ModelFolderError, match=reason):
        load_text_half(folder.path, None, "sdpa")
