"""Each half is loaded completely from the same folder, without any weight of the other half."""

from __future__ import annotations

import json
import logging
import pathlib
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from decoder_svc.runner.attention import PAGED_ATTENTION, register_paged_attention
from lookonce.errors import ModelFolderError
from lookonce.model import half_model
from lookonce.model.half_model import Half, load_text_half, load_vision_half, text_child
from lookonce.model.structure.inner_model import has_inner_model, inner_model
from lookonce.model.structure.latent_attention import LatentProjection
from tests import tiny_models
from tests.rust_panic import panic
from tests.tiny_families import FAMILIES

WEIGHTS = "model.safetensors"
# Parameters that both halves hold: small direct parameters of the inner model, used by the vision half.
_NEWLINES = ("granite4_vision", "llava_next", "llava_next_video", "llava_onevision")
IN_BOTH = {
    **{name: {"model.image_newline"} for name in _NEWLINES},
    "deepseek_ocr2": {"model.view_separator"},
    "deepseek_vl_hybrid": {"model.high_res_vision_alpha"},
}
# Beginning of the names of parameters that neither half holds.
IN_NEITHER = ("model.audio_tower.", "model.embed_audio.")
# Families with parts of the language model that stay in float32.
WITH_EXACT_PARTS = ("muse_spark",)
# Beginning of the names of buffers that are computed from modules of the whole.
FIXED = "model.fixed_embeddings."

Tensors = dict[str, Tensor]


class Collecting(logging.Handler):
    """Keeps the messages of warnings in a list."""

    def __init__(self, messages: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        """Adds the message of a record."""
        self._messages.append(record.getMessage())


@dataclass(frozen=True)
class Loaded:
    """A tiny model's folder, with the whole model and both halves loaded in float32."""

    name: str
    folder: pathlib.Path
    whole: Any
    text: Any
    vision: Any


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def loaded(request: pytest.FixtureRequest, family_folder: Callable[[str], pathlib.Path]) -> Loaded:
    folder = family_folder(request.param)
    text = load_half(Half.TEXT, folder, torch.float32)
    vision = load_half(Half.VISION, folder, torch.float32)
    return Loaded(request.param, folder, tiny_models.load_model(folder), text, vision)


def load_half(half: Half, folder: pathlib.Path, dtype: torch.dtype | None = None) -> Any:
    register_paged_attention()
    return load_text_half(folder, dtype, PAGED_ATTENTION) if half is Half.TEXT else load_vision_half(folder, dtype)


def parameters(model: Any) -> Tensors:
    """Returns a model's parameters by name. Those of latent attention are put together as they are in files."""
    found = dict(model.named_parameters())
    for name, module in model.named_modules():
        if isinstance(module, LatentProjection):
            keys, values = (found.pop(f"{name}.{half}_half").unflatten(0, (4, -1)) for half in ("key", "value"))
            found[f"{name}.weight"] = torch.cat((keys, values.transpose(1, 2)), dim=1).flatten(0, 1)
    return found


def tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def name_in_half(name: str, whole: Any) -> str:
    """Returns the name of a tensor of the whole model in its half, which has an inner model if the whole has none."""
    if has_inner_model(whole):
        return name
    child = text_child(whole)
    return re.sub(rf"^{child}\.", "", name.replace(f"{child}.model.", f"model.{child}."))


def is_language(name: str, whole: Any) -> bool:
    return name.startswith((f"model.{text_child(whole)}.", "lm_head."))


def changed_folder(folder: pathlib.Path, to: pathlib.Path, change: Callable[[Tensors], Tensors]) -> pathlib.Path:
    """Returns a copy of the model's folder with other tensors in its file."""
    shutil.copytree(folder, to)
    contents = {name: tensor.contiguous() for name, tensor in change(load_file(to / WEIGHTS)).items()}
    save_file(contents, to / WEIGHTS, metadata={"format": "pt"})
    return to


def check_halves(folder: pathlib.Path, expected: Loaded) -> None:
    """Asserts that the folder's halves are bit-equal to those of `expected`."""
    for half, model in ((Half.TEXT, expected.text), (Half.VISION, expected.vision)):
        wanted, found = parameters(model), parameters(load_half(half, folder, torch.float32))
        assert found.keys() == wanted.keys()
        for name, tensor in found.items():
            assert torch.equal(tensor, wanted[name]), name


def test_a_half_holds_no_tensor_of_the_other(loaded: Loaded) -> None:
    in_both = IN_BOTH.get(loaded.name, set())
    text = {name for name, _ in tensors(loaded.text) if not name.startswith(FIXED)}
    vision = dict(tensors(loaded.vision)).keys()
    assert {name for name in text if not is_language(name, loaded.whole)} == in_both
    assert not [name for name in vision if is_language(name, loaded.whole)]
    assert text & vision == in_both
    direct = inner_model(loaded.whole).named_parameters(recurse=False)
    assert in_both <= {f"model.{name}" for name, _ in direct}


def test_the_halves_are_the_whole_bit_by_bit(loaded: Loaded) -> None:
    text, vision = parameters(loaded.text), parameters(loaded.vision)
    whole = {name_in_half(name, loaded.whole): tensor for name, tensor in parameters(loaded.whole).items()}
    assert text.keys() | vision.keys() == {name for name in whole if not name.startswith(IN_NEITHER)}
    for half in (text, vision):
        for name, tensor in half.items():
            assert torch.equal(tensor, whole[name]), name


def test_buffers_that_no_file_holds_are_those_of_the_whole(loaded: Loaded) -> None:
    """These buffers are computed at loading: rotary frequencies, position ids, the scale of embeddings."""
    whole = {name_in_half(name, loaded.whole): buffer for name, buffer in loaded.whole.named_buffers()}
    for half in (loaded.text, loaded.vision):
        for name, buffer in half.named_buffers():
            assert name.startswith(FIXED) or torch.equal(buffer, whole[name]), name


def test_no_tensor_stays_on_the_meta_device(loaded: Loaded) -> None:
    for model in (loaded.text, loaded.vision):
        assert {tensor.device.type for _, tensor in tensors(model)} == {"cpu"}


def test_halves_neither_train_nor_drop_out(loaded: Loaded) -> None:
    for model in (loaded.text, loaded.vision):
        assert not any(module.training for module in model.modules())
        assert not any(tensor.requires_grad for _, tensor in tensors(model))


def test_shards_give_the_same_halves(loaded: Loaded, tmp_path: pathlib.Path) -> None:
    sharded = tmp_path / "sharded"
    loaded.whole.save_pretrained(sharded, max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 3
    assert not (sharded / WEIGHTS).exists()
    check_halves(sharded, loaded)


# Families whose attention has no rotary positions, and those whose models ignore `tie_word_embeddings`.
WITHOUT_ROTARY, NEVER_TIED = {"nemotron_h_omni"}, {"cosmos3_edge", "muse_spark", "nemotron_h_omni"}


def test_dtype_is_the_checkpoints_unless_overridden(loaded: Loaded) -> None:
    for half in Half:
        assert {tensor.dtype for _, tensor in load_half(half, loaded.folder).named_parameters()} == {torch.float32}
        model = load_half(half, loaded.folder, torch.bfloat16)
        # Routers of experts stay in float32 where transformers computes them so.
        exact = tuple(model._keep_in_fp32_modules_strict or ())
        others = [tensor for name, tensor in model.named_parameters() if not any(part in name for part in exact)]
        assert {tensor.dtype for tensor in others} == {torch.bfloat16}
        kept = {name: tensor for name, tensor in tensors(model) if any(part in name for part in exact)}
        wanted = dict(tensors(loaded.text if half is Half.TEXT else loaded.vision))
        assert all(tensor.dtype is torch.float32 and torch.equal(tensor, wanted[name]) for name, tensor in kept.items())
        assert bool(kept) or half is Half.VISION or loaded.name not in WITH_EXACT_PARTS
        # Rotary frequencies must stay in float32; bfloat16 is too coarse.
        rotary = [tensor for name, tensor in model.named_buffers() if "inv_freq" in name]
        assert {tensor.dtype for tensor in rotary} <= {torch.float32}
        assert half is Half.VISION or bool(rotary) == (loaded.name not in WITHOUT_ROTARY)


def test_the_head_of_a_tied_model_is_its_embedding(loaded: Loaded, tmp_path: pathlib.Path) -> None:
    """The file of a tied model has no tensor for the head."""
    tied = changed_folder(
        loaded.folder,
        tmp_path / "tied",
        lambda contents: {name: tensor for name, tensor in contents.items() if "lm_head" not in name},
    )
    with pytest.raises(ModelFolderError, match=r"1 missing \((language_model\.)?lm_head\.weight"):
        load_half(Half.TEXT, tied)
    set_config(tied, tie_word_embeddings=True)
    if loaded.name in NEVER_TIED:
        with pytest.raises(ModelFolderError, match=r"1 missing \((language_model\.)?lm_head\.weight"):
            load_half(Half.TEXT, tied)
        return
    text = load_half(Half.TEXT, tied, torch.float32)
    assert text.lm_head.weight is text.get_input_embeddings().weight
    assert torch.equal(text.lm_head.weight, loaded.text.get_input_embeddings().weight)
    assert parameters(load_half(Half.VISION, tied)).keys() == parameters(loaded.vision).keys()


def set_config(folder: pathlib.Path, **fields: Any) -> None:
    """Changes fields of the configuration, and of its text configuration if it has them, too."""
    config = json.loads((folder / "config.json").read_text())
    config |= fields
    config["text_config"] |= {name: value for name, value in fields.items() if name in config["text_config"]}
    (folder / "config.json").write_text(json.dumps(config))


# Rules from parameter names to tensor names of published files; the first match counts. They are written out, because
# `save_pretrained` undoes the library's own renaming.
_LLAVA = {
    r"^lm_head\.": "language_model.lm_head.",
    r"^model\.language_model\.": "language_model.model.",
    r"^model\.(vision_tower|multi_modal_projector|image_newline)": r"\1",
}
_LLAVA_WITH_CLIP = {r"^model\.vision_tower\.": "vision_tower.vision_model."} | _LLAVA
# A SigLIP tower had one more level.
_DEEPSEEK = {r"^model\.vision_model\.": "model.vision_model.vision_model."}
_ARIA = {
    r"^model\.language_model\.(.*experts\.)gate_up_proj$": r"language_model.model.\1fc1.weight",
    r"^model\.language_model\.(.*experts\.)down_proj$": r"language_model.model.\1fc2.weight",
} | _LLAVA
_QWEN = {r"^model\.language_model\.": "model.", r"^model\.visual\.": "visual."}
LAYOUTS = {
    **dict.fromkeys(("llava_clip", "llava_siglip", "llava_next", "llava_onevision"), _LLAVA_WITH_CLIP),
    **dict.fromkeys(("paligemma", "paligemma2", "gemma3", "aya_vision", "vipllava"), _LLAVA_WITH_CLIP),
    "llava_next_video": _LLAVA_WITH_CLIP,
    **dict.fromkeys(("pixtral", "mistral3", "internvl", "got_ocr2"), _LLAVA),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), _QWEN),
    **dict.fromkeys(("deepseek_vl", "deepseek_vl_hybrid"), _DEEPSEEK),
    "aria": _ARIA,
    # `save_pretrained` of transformers 5.23 gives the text layers a prefix (encoder) that published files do not have.
    "qianfan_ocr": {r"^lm_head\.": "language_model.lm_head.", r"^model\.language_model\.": "language_model.model."},
}
# Tensors that older versions also saved for LLaVA-1.5.
_OLD_BUFFERS = (
    "language_model.model.layers.0.self_attn.rotary_emb.inv_freq",
    "vision_tower.vision_model.embeddings.position_ids",
)


def published(name: str, rules: Mapping[str, str]) -> str:
    """Returns the name of a parameter's tensor in a published file."""
    for pattern, replacement in rules.items():
        if re.search(pattern, name):
            return re.sub(pattern, replacement, name)
    return name


@pytest.mark.parametrize("name", sorted(LAYOUTS))
@pytest.mark.parametrize("is_old", [True, False], ids=["published layout", "names of parameters"])
def test_names_of_published_files_give_the_same_halves(
    family_folder: Callable[[str], pathlib.Path], name: str, is_old: bool, tmp_path: pathlib.Path
) -> None:
    folder = family_folder(name)
    whole = parameters(tiny_models.load_model(folder))
    # Since transformers 4.52 many files use the parameter names.
    rules = LAYOUTS[name] if is_old else {}
    renamed = changed_folder(
        folder, tmp_path / "old", lambda _: {published(key, rules): tensor for key, tensor in whole.items()}
    )
    for half in Half:
        for key, tensor in parameters(load_half(half, renamed, torch.float32)).items():
            assert torch.equal(tensor, whole[key]), key


def test_the_old_names_are_those_of_llava_and_qwen2_vl() -> None:
    """Spells out the results of the rules above, on which the other tests rely."""
    assert [published(name, LAYOUTS["llava_clip"]) for name in (
        "model.language_model.embed_tokens.weight",
        "lm_head.weight",
        "model.vision_tower.encoder.layers.0.mlp.fc1.weight",
        "model.multi_modal_projector.linear_1.weight",
    )] == [
        "language_model.model.embed_tokens.weight",
        "language_model.lm_head.weight",
        "vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight",
        "multi_modal_projector.linear_1.weight",
    ]  # fmt: skip
    assert [published(name, LAYOUTS["qwen2_vl"]) for name in (
        "model.language_model.embed_tokens.weight", "lm_head.weight", "model.visual.blocks.0.attn.qkv.weight",
    )] == ["model.embed_tokens.weight", "lm_head.weight", "visual.blocks.0.attn.qkv.weight"]  # fmt: skip


def test_buffers_that_old_versions_saved_are_accepted(
    family_folder: Callable[[str], pathlib.Path], tmp_path: pathlib.Path
) -> None:
    old = changed_folder(
        family_folder("llava_clip"),
        tmp_path / "old",
        lambda contents: contents | {name: torch.zeros(8) for name in _OLD_BUFFERS},
    )
    for half in Half:
        load_half(half, old)


# Per half, one tensor's name in the file and in the model.
VICTIMS = {
    Half.TEXT: ("model.layers.1.mlp.up_proj.weight", "model.language_model.layers.1.mlp.up_proj.weight"),
    Half.VISION: ("visual.merger.mlp.0.weight", "model.visual.merger.mlp.0.weight"),
}
OTHER = {Half.TEXT: Half.VISION, Half.VISION: Half.TEXT}
each_half = pytest.mark.parametrize("half", list(Half), ids=lambda half: half.value)


@each_half
def test_a_missing_tensor_is_refused_by_name(
    family_folder: Callable[[str], pathlib.Path], half: Half, tmp_path: pathlib.Path
) -> None:
    saved, name = VICTIMS[half]

    def without_one(contents: Tensors) -> Tensors:
        del contents[saved]
        return contents

    broken = changed_folder(family_folder("qwen2_vl"), tmp_path / "broken", without_one)
    with pytest.raises(ModelFolderError, match=rf"the {half.value} weights .* 1 missing \({re.escape(name)}"):
        load_half(half, broken)
    load_half(OTHER[half], broken)


@each_half
def test_a_tensor_of_another_shape_is_refused_by_name(
    family_folder: Callable[[str], pathlib.Path], half: Half, tmp_path: pathlib.Path
) -> None:
    saved, name = VICTIMS[half]
    broken = changed_folder(
        family_folder("qwen2_vl"), tmp_path / "broken", lambda contents: contents | {saved: contents[saved][:-1]}
    )
    with pytest.raises(ModelFolderError, match=rf"the {half.value} weights .* 1 mismatched .*{re.escape(name)}"):
        load_half(half, broken)
    load_half(OTHER[half], broken)


@each_half
def test_an_unexpected_tensor_is_refused_by_name(
    family_folder: Callable[[str], pathlib.Path], half: Half, tmp_path: pathlib.Path
) -> None:
    """The file has one layer more than the configuration, as if it belonged to another model."""
    saved, name = (each.replace("1.", "9.").replace("0.", "9.") for each in VICTIMS[half])
    broken = changed_folder(
        family_folder("qwen2_vl"), tmp_path / "broken", lambda contents: contents | {saved: torch.zeros(2, 2)}
    )
    with pytest.raises(ModelFolderError, match=rf"the {half.value} weights .* 1 unexpected \({re.escape(name)}"):
        load_half(half, broken)
    load_half(OTHER[half], broken)


@each_half
def test_a_tensor_of_neither_half_is_refused_by_both(
    family_folder: Callable[[str], pathlib.Path], half: Half, tmp_path: pathlib.Path
) -> None:
    broken = changed_folder(
        family_folder("qwen2_vl"), tmp_path / "broken", lambda contents: contents | {"audio.weight": torch.zeros(2)}
    )
    with pytest.raises(ModelFolderError, match=r"1 unexpected \(audio\.weight"):
        load_half(half, broken)


def test_a_configuration_of_another_width_is_refused(loaded: Loaded, tmp_path: pathlib.Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(loaded.folder, broken)
    config = json.loads((broken / "config.json").read_text())
    text = config["text_config"]
    # In families with two kinds of experts the field of all layers' experts is a list, and some layers have none.
    has_experts = isinstance(text.get("moe_intermediate_size"), int)
    field = "moe_intermediate_size" if has_experts else "intermediate_size"
    width = text[field]
    # Layers of Gemma 3n may have different widths.
    text[field] = [2 * each for each in width] if isinstance(width, list) else 2 * width
    (broken / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFolderError, match=r"text weights do not fit.*; download the model again"):
        load_half(Half.TEXT, broken)


def test_a_padding_token_outside_of_the_vocabulary_is_an_error_of_the_folder(
    family_folder: Callable[[str], pathlib.Path], tmp_path: pathlib.Path
) -> None:
    """torch asserts that it is not."""
    broken = tmp_path / "broken"
    shutil.copytree(family_folder("qwen2_5_vl"), broken)
    config = json.loads((broken / "config.json").read_text())
    config["text_config"] |= {"vocab_size": 3, "pad_token_id": 5}
    (broken / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFolderError, match=r"text half cannot be built from config.json: AssertionError"):
        load_half(Half.TEXT, broken)


@pytest.mark.parametrize("half", list(Half))
def test_a_value_that_no_model_can_be_built_with_is_an_error_of_the_folder(
    half: Half, family_folder: Callable[[str], pathlib.Path], tmp_path: pathlib.Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(family_folder("qwen2_5_vl"), broken)
    config = json.loads((broken / "config.json").read_text())
    config["text_config" if half is Half.TEXT else "vision_config"]["hidden_act"] = "squared"
    (broken / "config.json").write_text(json.dumps(config))
    remedy = "use the config.json that belongs to the weights"
    with pytest.raises(
        ModelFolderError, match=rf"{half.value} half cannot be built from config.json: .*squared.*{remedy}"
    ):
        load_half(half, broken)


def test_problems_of_weights_are_told_once(
    family_folder: Callable[[str], pathlib.Path], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[str] = []
    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [Collecting(messages)])
    broken = changed_folder(
        family_folder("qwen2_vl"), tmp_path / "broken", lambda contents: contents | {"audio.weight": torch.zeros(2)}
    )
    with pytest.raises(ModelFolderError, match=r"1 unexpected \(audio\.weight"):
        load_half(Half.TEXT, broken)
    assert not messages


@pytest.mark.parametrize("half", list(Half))
def test_a_panic_while_weights_are_read_is_an_error_of_the_folder(
    family_folder: Callable[[str], pathlib.Path], monkeypatch: pytest.MonkeyPatch, half: Half
) -> None:
    def from_pretrained(*_: object, **__: object) -> None:
        raise panic()

    monkeypatch.setattr(half_model, "half_class", lambda *_: SimpleNamespace(from_pretrained=from_pretrained))
    with pytest.raises(ModelFolderError, match=r"the weights of .* cannot be read; download"):
        load_half(half, family_folder("llava_clip"), torch.float32)
