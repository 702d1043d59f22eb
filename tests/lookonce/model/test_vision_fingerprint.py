"""The fingerprint changes with everything that changes rows, and with nothing else."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from lookonce.content_key import EncoderFingerprint
from lookonce.embedding_meta import RowDtype
from lookonce.model import vision_fingerprint as vision_fingerprint_module
from lookonce.model.family_model import FamilyModel
from lookonce.model.half_model import load_vision_half
from lookonce.model.model_folder import ModelFolder
from lookonce.model.vision_fingerprint import dtype_name, iter_vision_tensors, raw_bytes, vision_fingerprint
from tests import tiny_models

Fingerprint = Callable[..., EncoderFingerprint]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tiny_models.build_llava_clip(tmp_path_factory.mktemp("fingerprint") / "llava")


@pytest.fixture
def model(path: pathlib.Path) -> Any:
    return load_vision_half(path, torch.float32)


@pytest.fixture
def fingerprint(path: pathlib.Path) -> Fingerprint:
    folder = ModelFolder.open(path)

    def compute(model: Any, row_dtype: RowDtype | None = None, **family: Any) -> EncoderFingerprint:
        loaded = FamilyModel.load(folder)
        return vision_fingerprint(folder, model, replace(loaded, data=replace(loaded.data, **family)), row_dtype)

    return compute


def test_the_same_weights_give_the_same_fingerprint(model: Any, path: pathlib.Path, fingerprint: Fingerprint) -> None:
    assert fingerprint(model) == fingerprint(load_vision_half(path, torch.float32))


def test_one_changed_bit_of_a_weight_changes_it(model: Any, fingerprint: Fingerprint) -> None:
    before = fingerprint(model)
    weight = model.model.multi_modal_projector.linear_1.weight
    with torch.no_grad():
        weight.view(torch.int32)[0, 0] ^= 1
    assert fingerprint(model) != before


def test_another_version_of_decoding_changes_it(
    model: Any, fingerprint: Fingerprint, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = fingerprint(model)
    monkeypatch.setattr(vision_fingerprint_module, "_PIXELS_VERSION", vision_fingerprint_module._PIXELS_VERSION + 1)
    assert fingerprint(model) != before


def test_the_language_models_configuration_does_not_count(model: Any, fingerprint: Fingerprint) -> None:
    before = fingerprint(model)
    model.config.text_config.rope_theta = 5.0
    model.config._name_or_path = "elsewhere"
    assert fingerprint(model) == before
    model.config.vision_feature_layer = -1
    assert fingerprint(model) != before


def test_parts_that_the_family_takes_from_the_language_model_count(model: Any, fingerprint: Fingerprint) -> None:
    plain = fingerprint(model)
    with_settings = fingerprint(model, text_settings=lambda _config: {"epsilon": 1})
    assert len({plain, with_settings, fingerprint(model, text_settings=lambda _config: {"epsilon": 2})}) == 3
    assert fingerprint(model, text_settings=lambda _config: {}) == plain


def test_the_familys_arguments_for_processor_and_model_count(model: Any, fingerprint: Fingerprint) -> None:
    others = (
        fingerprint(model),
        fingerprint(model, inputs=("pixel_values",)),
        fingerprint(model, processor_arguments=lambda _source, _options: {"crop": True}),
    )
    assert len(set(others)) == 3


def test_the_element_types_of_model_and_rows_count(model: Any, path: pathlib.Path, fingerprint: Fingerprint) -> None:
    native = fingerprint(model)
    assert fingerprint(model, RowDtype.FLOAT32) == native
    assert fingerprint(model, RowDtype.INT8_SCALED) != native
    assert fingerprint(load_vision_half(path, torch.bfloat16)) != native


def test_tensors_come_in_the_order_of_their_names(model: Any) -> None:
    names = [name for name, _ in iter_vision_tensors(model)]
    assert names == sorted(names)
    assert any("vision_tower" in name for name in names)


def test_raw_bytes_share_the_tensors_memory() -> None:
    tensor = torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16)
    view = raw_bytes(tensor)
    assert bytes(view) == b"\x80\x3f\x00\x40"
    tensor[0, 0] = 0
    assert bytes(view[:2]) == b"\x00\x00"


def test_an_element_type_is_named_without_its_package(model: Any) -> None:
    assert dtype_name(model) == "float32"
