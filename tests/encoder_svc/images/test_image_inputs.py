"""Pixels that may share a pass, copies of which one counts, and pairs of frames."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import PIL.Image
import pytest
import torch

from encoder_svc.images.image_inputs import PixelInputs
from encoder_svc.vision.vision_model import VisionModel
from lookonce.content_key import ProcessorOptions
from tests import image_files

Models = Callable[[str], VisionModel]


def inputs(*sizes: tuple[int, ...], num_rows: int = 1) -> PixelInputs:
    names = ("pixel_values", "image_grid_thw")
    return PixelInputs({name: torch.zeros(size) for name, size in zip(names, sizes, strict=False)}, num_rows)


@pytest.mark.parametrize(
    ("one", "other", "go_together"),
    [
        (inputs((1, 3, 56, 56)), inputs((1, 3, 56, 56)), True),
        (inputs((4, 3, 56, 56)), inputs((1, 3, 56, 56)), True),
        (inputs((1, 3, 56, 56)), inputs((1, 3, 56, 28)), False),
        (inputs((16, 1176), (1, 3)), inputs((4, 1176), (1, 3)), True),
        (inputs((16, 1176), (1, 3)), inputs((16, 1176)), False),
    ],
)
def test_images_go_together_when_all_axes_but_the_first_agree(
    one: PixelInputs, other: PixelInputs, go_together: bool
) -> None:
    assert one.goes_with(other) == other.goes_with(one) == go_together


def test_packed_images_go_together_whatever_their_numbers_of_patches_are() -> None:
    one, other, rougher = (
        PixelInputs({"pixel_values": torch.zeros(1, 3, side, 40 * number)}, 1, packed=frozenset({"pixel_values"}))
        for number, side in ((1, 14), (2, 14), (2, 16))
    )
    assert one.goes_with(other)
    assert not other.goes_with(rougher)


def test_packed_images_of_several_sizes_have_the_rows_that_each_has_alone(vision_model: Models) -> None:
    model = vision_model("minicpmv4_6")
    batch = [
        model.adapter.pixel_inputs(image_files.noise(seed, *size), ProcessorOptions())
        for seed, size in enumerate([(80, 60), (30, 30), (300, 40)])
    ]
    assert [inputs.num_rows for inputs in batch] == [12, 4, 17]
    together = model.forward(batch)
    for rows, inputs in zip(together, batch, strict=True):
        torch.testing.assert_close(rows, model.forward([inputs])[0], rtol=1e-4, atol=1e-4)


def test_tiles_that_lie_apart_count_as_pixels() -> None:
    assert inputs((1, 3, 4, 4)).size_bytes == 3 * 4 * 4 * 4
    tiled = PixelInputs({"pixel_values": torch.zeros(1, 3, 4, 4), "pixel_values_local": torch.zeros(5, 3, 4, 4)}, 9)
    assert tiled.size_bytes == 6 * 3 * 4 * 4 * 4


def test_rows_of_copies_are_left_out(vision_model: Models) -> None:
    adapter = vision_model("llava_clip").adapter
    image = adapter.pixel_inputs(image_files.noise(1), ProcessorOptions())
    twice = PixelInputs({"pixel_values": image.pixel_values.repeat(2, 1, 1, 1)}, image.num_rows, num_copies=2)
    with torch.inference_mode():
        (alone,) = adapter.image_rows(vision_model("llava_clip")._model, [image])
        first, second = adapter.image_rows(vision_model("llava_clip")._model, [twice, image])
    torch.testing.assert_close(first, alone, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(second, alone, rtol=1e-5, atol=1e-5)


def pair_options(model: VisionModel) -> ProcessorOptions:
    video = model.adapter.model.video
    assert video is not None
    side = 4 * video.unit[0]
    return ProcessorOptions(frame_size=(side, side))


def test_a_single_frame_stands_for_two_equal_ones(vision_model: Models) -> None:
    model = vision_model("qwen2_vl")
    options = pair_options(model)
    frame = image_files.noise(1, 100, 80)
    one = model.adapter.frame_inputs([frame], options)
    two = model.adapter.frame_inputs([frame, frame], options)
    assert one.num_rows == two.num_rows
    assert torch.equal(one.pixel_values, two.pixel_values)


def test_each_frame_fills_its_own_half_of_a_pair(vision_model: Models) -> None:
    model = vision_model("qwen2_vl")
    options = pair_options(model)
    first, second = image_files.noise(1, 100, 80), image_files.noise(2, 100, 80)
    both = model.adapter.frame_inputs([first, second], options)
    side = model.adapter.processor.patch_size
    for index, frame in enumerate((first, second)):
        alone = model.adapter.frame_inputs([frame], options)
        halves = [one.pixel_values.view(-1, 3, 2, side, side)[:, :, index] for one in (both, alone)]
        assert torch.equal(*halves)


def test_a_frame_is_small_before_the_next_one_is_decoded(vision_model: Models) -> None:
    model = vision_model("qwen2_vl")
    options = pair_options(model)
    resized: list[PIL.Image.Image] = []

    class Frame(PIL.Image.Image):
        def resize(self, *arguments: object, **keywords: object) -> PIL.Image.Image:
            resized.append(self)
            return image_files.noise(1, *options.frame_size)  # type: ignore[misc]

    def frames() -> Iterator[PIL.Image.Image]:
        for number in range(2):
            assert len(resized) == number
            yield Frame()

    model.adapter.frame_inputs(frames(), options)
    assert len(resized) == 2
