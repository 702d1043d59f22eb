"""The fingerprint computed from a folder is the one that an encoder serving that folder reports."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Literal

import pytest

from encoder_svc.vision.vision_config import VisionConfig
from encoder_svc.vision.vision_model import VisionModel
from lookonce.content_key import EncoderFingerprint
from lookonce.embedding_meta import RowDtype
from lookonce.model.family_model import FamilyModel
from lookonce.model.fingerprint_process import main
from lookonce.model.folder_fingerprint import folder_fingerprint
from lookonce.model.model_folder import ModelFolder
from tests.tiny_families import FAMILIES

Dtype = Literal["float32", "bfloat16", "float16"]
DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16", "float16")


@pytest.fixture(scope="module")
def qwen3_vl(family_folder: Callable[[str], pathlib.Path]) -> pathlib.Path:
    return family_folder("qwen3_vl")


def found(path: pathlib.Path, dtype: Dtype, row_dtype: RowDtype | None) -> EncoderFingerprint:
    folder = ModelFolder.open(path)
    fingerprint, computed_in = folder_fingerprint(folder, FamilyModel.load(folder), RowDtype(dtype), row_dtype)
    assert computed_in.value == dtype
    return fingerprint


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_it_is_the_encoder_s(name: str, family_folder: Callable[[str], pathlib.Path]) -> None:
    folder = family_folder(name)
    assert found(folder, "bfloat16", None) == VisionModel.load(VisionConfig(folder, "cpu", "bfloat16")).fingerprint


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row_format", ["native", "int8"])
def test_it_is_the_encoder_s_with_any_types(
    qwen3_vl: pathlib.Path, dtype: Dtype, row_format: Literal["native", "int8"]
) -> None:
    encoder = VisionModel.load(VisionConfig(qwen3_vl, "cpu", dtype, row_format))
    assert found(qwen3_vl, dtype, RowDtype.INT8_SCALED if row_format == "int8" else None) == encoder.fingerprint


def test_the_program_prints_one_for_each_type(qwen3_vl: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(qwen3_vl), "int8_scaled", *DTYPES])
    printed = capsys.readouterr().out.split()
    assert printed == [found(qwen3_vl, dtype, RowDtype.INT8_SCALED) for dtype in DTYPES]


def test_a_folder_that_cannot_be_served_is_told_in_one_line(tmp_path: pathlib.Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path), "float32", "float32"])
    assert "is empty; download a model into it" in str(ended.value.code)
