"""Layouts and positions are equal to those of the Hugging Face processor and model."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch

from decoder_svc.prompt.family import load_family
from decoder_svc.scheduling.prompt import Span
from lookonce.content_key import ProcessorOptions
from lookonce.errors import ImageTooLargeError, InvalidParameterError
from lookonce.model.half_model import load_text_half
from lookonce.model.model_folder import ModelFolder
from tests import tiny_models

SIZES = [(80, 60), (56, 56), (140, 60), (60, 140), (400, 300), (28, 28), (500, 40)]


@pytest.fixture(scope="module", params=sorted(tiny_models.BUILDERS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path: pathlib.Path = tmp_path_factory.mktemp("models") / request.param
    return tiny_models.BUILDERS[request.param](path)


def expanded(processor: Any, sizes: list[tuple[int, int]], family: Any) -> list[int]:
    images = [tiny_models.random_image(index, *size) for index, size in enumerate(sizes)]
    text = " a ".join([family.image_token] * len(sizes))
    token_ids: list[int] = processor(text=text, images=images)["input_ids"][0]
    return list(token_ids)


def test_layouts_have_as_many_tokens_as_the_processor_makes(folder: pathlib.Path) -> None:
    processor = tiny_models.load_processor(folder)
    family = load_family(ModelFolder.open(folder), processor.tokenizer)
    for size in SIZES:
        layout = family.image_layout(*size, ProcessorOptions())
        count = expanded(processor, [size], family).count(family.image_token_id)
        assert len(layout.token_ids) == layout.num_rows == count
        assert layout.num_rows <= family.max_rows_per_image


def test_rotary_positions_equal_the_models_own(folder: pathlib.Path) -> None:
    processor = tiny_models.load_processor(folder)
    family = load_family(ModelFolder.open(folder), processor.tokenizer)
    token_ids = expanded(processor, SIZES, family)
    spans, layouts, offset = [], [], 0
    for size in SIZES:
        layouts.append(family.image_layout(*size, ProcessorOptions()))
        offset = token_ids.index(family.image_token_id, offset)
        spans.append(Span(offset, layouts[-1].span_length))
        offset = spans[-1].stop
    positions = family.positions(token_ids, spans, layouts)
    if family.num_position_axes == 1:
        assert positions is None
        return
    assert positions is not None
    model = load_text_half(folder, torch.float32, "sdpa")
    ids = torch.tensor([token_ids])
    grids = torch.tensor([layout.grid for layout in layouts])
    grids[:, 1:] *= 2
    expected, delta = model.model.get_rope_index(
        input_ids=ids, mm_token_type_ids=(ids == family.image_token_id).int(), image_grid_thw=grids
    )
    assert torch.equal(torch.tensor(positions.axes), expected[:, 0])
    assert positions.delta == int(delta)


def test_text_only_positions_count_from_zero(folder: pathlib.Path) -> None:
    processor = tiny_models.load_processor(folder)
    family = load_family(ModelFolder.open(folder), processor.tokenizer)
    positions = family.positions([5, 6, 7], [], [])
    assert positions is None or (positions.axes == ((0, 1, 2),) * 3 and positions.delta == 0)


def test_qwen2_vl_takes_fewer_rows_for_fewer_pixels_and_refuses_impossible_sizes(tmp_path: pathlib.Path) -> None:
    path = tiny_models.build_qwen2_vl(tmp_path / "qwen")
    family = load_family(ModelFolder.open(path), tiny_models.load_processor(path).tokenizer)
    whole = family.image_layout(400, 300, ProcessorOptions())
    fewer = family.image_layout(400, 300, ProcessorOptions(max_pixels=8 * 28 * 28))
    assert fewer.num_rows <= 8 < whole.num_rows
    with pytest.raises(InvalidParameterError, match="max_pixels"):
        family.image_layout(400, 300, ProcessorOptions(max_pixels=10**9))
    with pytest.raises(ImageTooLargeError, match="elongated"):
        family.image_layout(5000, 10, ProcessorOptions())
