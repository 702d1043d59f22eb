"""Calling convention of a vision half: image → input tensors, output tensors → rows of each image.

One path for all families; their differences are data (`lookonce/families/`). Stateless after construction; used from
several threads.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import PIL.Image
import torch

from lookonce.content_key import ProcessorOptions
from lookonce.errors import InvalidParameterError
from lookonce.families.base import Family
from lookonce.families.frame_pairs import FramePairs
from lookonce.families.single_frames import SingleFrames
from lookonce.image_file import FRAMES_PER_PAIR, FramePair, ImageFile
from lookonce.model.family_model import FamilyModel
from lookonce.model.model_folder import ModelFolder

_RGB_CHANNELS = 3
# Names of the tensors with pixels: those of images, and those for `get_video_features`.
_PIXELS, _VIDEO_PIXELS = "pixel_values", "pixel_values_videos"


@dataclass(frozen=True, slots=True)
class PixelInputs:
    """The image processor's output for one image, or for an entry of video frames."""

    # By argument name of `get_image_features` or `get_video_features`. The first axis counts images, frames, patches or
    # tiles, except of packed tensors; pixels are fp32.
    tensors: Mapping[str, torch.Tensor]
    # Number of rows, computed from the image's size.
    num_rows: int
    # Copies of the image in the tensors, for families that need several; only the first copy's rows are used.
    num_copies: int = 1
    # Places among the rows of those that all images share, ascending, and their indexes.
    shared_rows: Mapping[int, int] = field(default_factory=dict)
    # Names of packed tensors, whose last axis counts patches. They are joined along it.
    packed: frozenset[str] = frozenset()

    @property
    def pixel_values(self) -> torch.Tensor:
        """The tensor that holds the pixels."""
        return self.tensors[_VIDEO_PIXELS if self.is_video else _PIXELS]

    @property
    def is_video(self) -> bool:
        """Whether the vision half has a method of its own for these pixels."""
        return _VIDEO_PIXELS in self.tensors

    @property
    def size_bytes(self) -> int:
        """Size of all tensors, bytes: tiles may lie apart from the whole image."""
        return sum(int(tensor.nbytes) for tensor in self.tensors.values())

    def goes_with(self, other: PixelInputs) -> bool:
        """Whether both can be joined without padding, packed tensors along the last axis and others along the first."""
        return self._joint_shapes() == other._joint_shapes()

    def _joint_shapes(self) -> dict[str, torch.Size]:
        return {
            name: tensor.shape[:-1] if name in self.packed else tensor.shape[1:]
            for name, tensor in self.tensors.items()
        }


class VisionAdapter:
    """A model folder's image processor and the calling convention of its vision half."""

    def __init__(self, model: FamilyModel) -> None:
        self.family: Family = model.data
        self.processor: Any = model.source.processor
        self.num_levels = model.num_levels
        self.model = model

    @classmethod
    def load(cls, folder: ModelFolder) -> VisionAdapter:
        """The adapter of a model folder.

        Raises ModelFolderError when the folder has no image processor, or parts that its family does not know.
        """
        return cls(FamilyModel.load(folder))

    def check_options(self, options: ProcessorOptions) -> None:
        """Raises InvalidParameterError for options that the model does not have or values out of range."""
        self.model.check_options(options)

    def check_files(self, data: ImageFile | None) -> None:
        """Raises InvalidParameterError for two frames if an entry of this model holds a single one.

        Call it before caches are asked: a frame with itself as the second one has the same key as alone.
        """
        is_pair = isinstance(data, FramePair) and data.second is not None
        if is_pair and self.model.video is not None and self.model.video.frames_per_entry == 1:
            raise InvalidParameterError(
                "second_frame", f"{self.family.title} encodes frames one by one; leave it unset"
            )

    def check_size(self, width: int, height: int, options: ProcessorOptions) -> None:
        """Raises ImageTooLargeError for an image or frame size that the processor cannot handle.

        Raises InvalidParameterError for a `frame_size` that a single frame of this size does not have.
        """
        self.model.image_shape(width, height, options)
        video = self.model.video
        if options.frame_size is None or video is None or video.frames_per_entry > 1:
            return
        resized = self.model.frame_size(width, height, 1, None)
        if resized != options.frame_size:
            stated, found = (f"{size[0]} × {size[1]}" for size in (options.frame_size, resized))
            raise InvalidParameterError(
                "frame_size", f"is {stated}, but this model resizes frames of {width} × {height} pixels to {found}"
            )

    def pixel_inputs(self, image: PIL.Image.Image, options: ProcessorOptions) -> PixelInputs:
        """Pixels of one upright RGB image; `options` must have been checked.

        Raises ImageTooLargeError for an image whose proportions the processor refuses.
        """
        shape = self.model.image_shape(image.width, image.height, options)
        arguments = self.family.processor_arguments(self.model.source, options)
        num_copies = self.family.num_copies(shape, options)
        tensors = self._processed([image] * num_copies, arguments)
        return PixelInputs(tensors, shape.num_rows, num_copies, shape.shared_rows, self.family.packed_inputs)

    def frame_inputs(self, frames: Iterable[PIL.Image.Image], options: ProcessorOptions) -> PixelInputs:
        """Pixels of an entry of video frames, upright and RGB: a pair, or a single frame.

        `options` and the frames' size must have been checked. Of a pair, each frame is scaled before the next one is
        taken from `frames`, so that only one is in memory at full size.
        """
        assert options.frame_size is not None, "frames have a size"
        video = self.model.video
        if isinstance(video, FramePairs):
            tensors = self._pair_tensors(video, frames, options.frame_size)
        else:
            assert isinstance(video, SingleFrames), "check_options() comes first"
            (frame,) = frames
            tensors = self._frame_tensors(video, frame)
        return PixelInputs(tensors, video.entry_shape(options.frame_size).num_rows)

    def _frame_tensors(self, video: SingleFrames, frame: PIL.Image.Image) -> dict[str, torch.Tensor]:
        tensors = self._processed([frame], video.arguments, video.processor)
        # [frames, channels, height, width] → [videos, frames of each, channels, height, width]
        return {_VIDEO_PIXELS: tensors[_PIXELS][:, None]} if video.rule.has_video_method else tensors

    def _pair_tensors(
        self, video: FramePairs, frames: Iterable[PIL.Image.Image], frame_size: tuple[int, int]
    ) -> dict[str, torch.Tensor]:
        """The vision half's arguments for a pair; a single frame stands for two equal ones.

        The processor treats an image as a pair of equal frames and returns patches [num_patches, channels, 2, side,
        side]. Index 1 of the third axis is then replaced by the second frame's.
        """
        pixels = dict(video.settings.pixels)
        resample = pixels.pop("resample", PIL.Image.Resampling.BICUBIC)
        # map() instead of a loop, whose variable would keep a frame in memory while the next one is decoded.
        sized = map(operator.methodcaller("resize", frame_size, resample), frames)
        first, *others = [self._processed([frame], {"do_resize": False, **pixels}) for frame in sized]
        side = self.processor.patch_size
        for other in others:
            halves, of_other = (
                tensors["pixel_values"].view(-1, _RGB_CHANNELS, FRAMES_PER_PAIR, side, side)
                for tensors in (first, other)
            )
            halves[:, :, 1] = of_other[:, :, 1]
        return first

    def _processed(
        self, images: list[PIL.Image.Image], arguments: Mapping[str, Any], processor: Any = None
    ) -> dict[str, torch.Tensor]:
        """The vision half's arguments for the images of one prompt; `processor` None: the folder's own."""
        # The processor expects a list of prompts, each a list of images.
        processed = (processor or self.processor)(images=[images], return_tensors="pt", **arguments)
        given = {name: processed[name] for name in self.family.inputs if name in processed}
        return {name: torch.as_tensor(value) for name, value in given.items()}

    def image_rows(self, model: Any, batch: Sequence[PixelInputs]) -> list[torch.Tensor]:
        """Runs one forward pass over images that go together.

        Returns rows [num_rows, (1 + num_levels) * hidden_size] of each. Raises ValueError when the vision half returns
        another number of rows than computed from the images' sizes: rows would end up at another image's placeholders.
        """
        names, packed = batch[0].tensors, batch[0].packed
        joined = {
            name: torch.cat([inputs.tensors[name] for inputs in batch], dim=-1 if name in packed else 0)
            for name in names
        }
        arguments = {
            name: tensor.to(model.device, model.dtype if tensor.is_floating_point() else None)
            for name, tensor in joined.items()
        }
        # Called on the inner model, because not every outer class forwards this method.
        features = model.model.get_video_features if batch[0].is_video else model.model.get_image_features
        output = features(**arguments, return_dict=True)
        levels = self.family.levels(output) if self.num_levels else [self.family.rows(model, output)]
        rows = torch.cat([_flat(level) for level in levels], dim=-1)
        num_own = [inputs.num_rows - len(inputs.shared_rows) for inputs in batch]
        counts = [own * inputs.num_copies for own, inputs in zip(num_own, batch, strict=True)]
        if len(rows) != sum(counts):
            raise ValueError(f"the vision half gave {len(rows)} rows for images that take {counts}")
        shared = self.family.shared_rows(output)
        return [
            _with_shared(part[:own], inputs.shared_rows, shared)
            for part, own, inputs in zip(rows.split(counts), num_own, batch, strict=True)
        ]


def _with_shared(rows: torch.Tensor, places: Mapping[int, int], shared: Sequence[torch.Tensor]) -> torch.Tensor:
    """Inserts shared rows at their places, in ascending order."""
    for place, index in places.items():
        rows = torch.cat([rows[:place], shared[index][None], rows[place:]])
    return rows


def _flat(features: Any) -> torch.Tensor:
    """Returns the rows of all images in one tensor. Some families give one tensor, others one per image."""
    parts = [features] if isinstance(features, torch.Tensor) else list(features)
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])
