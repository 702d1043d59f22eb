"""The reference of videos as pairs of frames, computed from its definitions.

From 5.3 on, positions and timestamps in transformers differ from those of the models' authors (docs/adr/0010).
"""

from __future__ import annotations

import inspect
import itertools
import pathlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import PIL.Image
import torch

from tests.parity import videos
from tests.parity.videos import MEAN, STD, Part, Video

# Pixel bounds in rows: of all frames together for Qwen3-VL, of each frame for the others.
LEAST_ROWS, MOST_ROWS = 4, 60
# The whole processor of Qwen2.5-Omni sets its own.
_BOUNDS_OF_OMNI = 128, 768
_TEXT, _IMAGE, _VIDEO = 0, 1, 2
# Families with the layout of Qwen3-VL that are not called so.
_WITHOUT_CLOCK = ("cohere_compass", "cosmos3_omni", "lfm3_vl")
# Those whose only published processor leaves the marks around a video's placeholder in place.
_INSIDE_MARKS = ("cohere_compass", "lfm3_vl")
# Families of GLM that write times with a decimal and a unit.
_WITH_DECIMALS = ("glm46v", "glmga")
# Marks the rows of videos, so that they are not taken for a placeholder.
_ROW = "<|video_row|>"


class PairModel(videos.VideoModel):
    """A model that encodes pairs of frames."""

    def __init__(self, family: ModuleType, folder: pathlib.Path) -> None:
        super().__init__(family, folder)
        self.few_pixels = (self.bounds[0] + 5) * self.square
        if self.has_clock and not self.is_omni:
            self.reference.model.get_rope_index = self._positions
        if self.is_glm:
            # transformers 5.23 takes the rows of videos for those of images if a prompt has both.
            self.reference.model.get_placeholder_mask = self._placeholder_masks
        self._steps: list[float] = []

    @property
    def square(self) -> int:
        """Pixels of a frame that become a row."""
        return int((self.patch * self.merge) ** 2)

    @property
    def patch(self) -> int:
        """Pixels along a side of a patch."""
        return int(self.processor.image_processor.patch_size)

    @property
    def merge(self) -> int:
        """Patches along a side of a row."""
        return int(self.processor.image_processor.merge_size)

    @property
    def bounds(self) -> tuple[int, int]:
        """Least and most pixels in rows."""
        return _BOUNDS_OF_OMNI if self.is_omni else (LEAST_ROWS, MOST_ROWS)

    def video_settings(self) -> dict[str, Any]:
        """Returns settings that fit the tiny model."""
        size = {"shortest_edge": LEAST_ROWS * self.square, "longest_edge": MOST_ROWS * self.square}
        return {"size": size, "temporal_patch_size": 2}

    @property
    def has_clock(self) -> bool:
        """Whether the pairs of a video share a time axis; otherwise each has its time as text."""
        return not ("qwen3" in self.name or self.name in _WITHOUT_CLOCK or self.is_glm)

    @property
    def is_omni(self) -> bool:
        """Whether the library's positions are those of the model's authors."""
        return "qwen2_5_omni" in self.name

    @property
    def is_glm(self) -> bool:
        """Whether pairs of frames have the token of images."""
        return "glm" in self.name

    def inputs(self, parts: Sequence[Part]) -> dict[str, Any]:
        """Returns the arguments of the whole model's `generate`."""
        text = self.rendered(parts)
        shown = [part for part in parts if isinstance(part, Video)]
        images = [part for part in parts if isinstance(part, PIL.Image.Image)]
        inputs: dict[str, Any] = {}
        if images:
            inputs |= self.processor.image_processor(images=images, return_tensors="pt")
        pixels, grids = [], []
        for video in shown:
            size = self._frame_size(video)
            pixels.append(self._patches(video, size))
            grids.append([-(-len(video.frames) // 2), size[1] // self.patch, size[0] // self.patch])
            text = self._with_video(text, video, grids[-1])
        image, video_token = self.processor.image_token, self.processor.video_token
        for grid in inputs.get("image_grid_thw", torch.zeros(0, 3)).tolist():
            num_rows = grid[1] * grid[2] // self.merge**2
            text = text.replace(image, "<|placeholder|>" * int(num_rows), 1)
        text = text.replace("<|placeholder|>", image).replace(_ROW, image if self.is_glm else video_token)
        ids = self.processor.tokenizer(text, return_tensors="pt")["input_ids"]
        types = self._types(ids)
        inputs |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if "mm_token_type_ids" in inspect.signature(self.reference.forward).parameters:
            inputs["mm_token_type_ids"] = types
        if shown:
            inputs["pixel_values_videos"] = torch.cat(pixels)
            inputs["video_grid_thw"] = torch.tensor(grids)
            if self.is_omni:
                inputs["video_second_per_grid"] = torch.tensor([2 / video.fps for video in shown])
        self._steps = [self._step(video) for video in shown]
        return inputs

    def _frame_size(self, video: Video) -> tuple[int, int]:
        """Returns (width, height) by the rule in each family's paper and published processor."""
        width, height = video.frames[0].size
        factor = self.patch * self.merge
        share = 1 if self.has_clock else len(video.frames)
        least, most = (bound * self.square / share for bound in self.bounds)
        most = min(most, video.max_pixels or most)
        columns, rows = round(width / factor), round(height / factor)
        # Each pair counts as two frames when all frames together are compared with the bounds.
        counted = 1 if self.has_clock else round(len(video.frames) / 2) * 2 / len(video.frames)
        if counted * columns * rows * self.square > most:
            shrink = (width * height / most) ** 0.5
            columns, rows = max(1, int(width / shrink / factor)), max(1, int(height / shrink / factor))
        elif counted * columns * rows * self.square < least:
            grow = (least / (width * height)) ** 0.5
            columns, rows = -int(-width * grow // factor), -int(-height * grow // factor)
        return columns * factor, rows * factor

    def _patches(self, video: Video, size: tuple[int, int]) -> torch.Tensor:
        """Returns [patches, channels × 2 × side × side]; a pair's patches are ordered by merged squares, row by row."""
        pictures = [np.asarray(frame.resize(size, PIL.Image.Resampling.BICUBIC)) for frame in video.frames]
        values = [(picture / 255.0 - np.array(MEAN)) / np.array(STD) for picture in pictures]
        if len(values) % 2:
            values.append(values[-1])
        found = []
        side, merge = self.patch, self.merge
        columns, rows = size[0] // (side * merge), size[1] // (side * merge)
        for first, second in zip(values[::2], values[1::2], strict=True):
            for row, column, inner_row, inner_column in itertools.product(
                range(rows), range(columns), range(merge), range(merge)
            ):
                top, left = (row * merge + inner_row) * side, (column * merge + inner_column) * side
                both = np.stack([one[top : top + side, left : left + side] for one in (first, second)])
                # [frames, height, width, channels] → [channels, frames, height, width]
                found.append(both.transpose(3, 0, 1, 2).reshape(-1))
        return torch.tensor(np.stack(found), dtype=torch.float32)

    def _with_video(self, text: str, video: Video, grid: list[int]) -> str:
        """Replaces the first video's placeholder in the text with its tokens."""
        rows = _ROW * (grid[1] * grid[2] // self.merge**2)
        if self.has_clock:
            written = text.replace(self.processor.video_token, rows * grid[0], 1)
        elif self.is_glm:
            times = [2 * pair / video.fps for pair in range(grid[0])]
            names = [f"{time:.1f} seconds" if self.name in _WITH_DECIMALS else str(int(time)) for time in times]
            said = [f"<|begin_of_image|>{rows}<|end_of_image|>{name}" for name in names]
            written = text.replace("<|video|>", "".join(said), 1)
        else:
            said = []
            start, end = self.processor.vision_start_token, self.processor.vision_end_token
            for pair in range(grid[0]):
                times = [2 * pair, min(2 * pair + 1, len(video.frames) - 1)]
                said.append(f"<{sum(times) / 2 / video.fps:.1f} seconds>{start}{rows}{end}")
            token = self.processor.video_token
            replaced = token if self.name in _INSIDE_MARKS else f"{start}{token}{end}"
            written = text.replace(replaced, "".join(said), 1)
        assert written != text
        return written

    def _types(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns whether each token belongs to text, an image or a video."""
        config = self.reference.config
        types = torch.zeros_like(ids)
        types[ids == config.image_token_id] = _IMAGE
        types[ids == config.video_token_id] = _VIDEO
        if self.is_glm:
            begun, ended = (
                (ids == token).cumsum(1) for token in (config.video_start_token_id, config.video_end_token_id)
            )
            types[(types == _IMAGE) & (begun > ended)] = _VIDEO
        return types

    def _placeholder_masks(
        self, input_ids: torch.Tensor, inputs_embeds: torch.Tensor, **_: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns which elements of the embeddings belong to images and to videos."""
        types = self._types(input_ids)[..., None].expand_as(inputs_embeds)
        return types == _IMAGE, types == _VIDEO

    def _step(self, video: Video) -> float:
        """Returns the step on the time axis between pairs."""
        if self.name == "qwen2_vl":
            return 1.0
        return float(getattr(self.reference.config.vision_config, "tokens_per_second", 0) * 2 / video.fps)

    def _positions(
        self,
        input_ids: torch.Tensor,
        mm_token_type_ids: torch.Tensor,
        image_grid_thw: torch.Tensor | None = None,
        video_grid_thw: torch.Tensor | None = None,
        **_: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns M-RoPE positions as arXiv:2409.12191 and arXiv:2502.13923 define them.

        Text after an image or video starts behind the largest position so far.
        """
        grids = {
            _IMAGE: iter([] if image_grid_thw is None else image_grid_thw.tolist()),
            _VIDEO: iter([] if video_grid_thw is None else video_grid_thw.tolist()),
        }
        steps = iter(self._steps)
        found: list[tuple[int, int, int]] = []
        for kind, group in itertools.groupby(mm_token_type_ids[0].tolist()):
            start = 1 + max((max(one) for one in found), default=-1)
            if kind == _TEXT:
                found += [(start + index,) * 3 for index, _ in enumerate(group)]
                continue
            times, height, width = next(grids[kind])
            step = next(steps) if kind == _VIDEO else 1.0
            found += [
                (start + int(time * step), start + row, start + column)
                for time, row, column in itertools.product(
                    range(times), range(height // self.merge), range(width // self.merge)
                )
            ]
        positions = torch.tensor(found).T[:, None]
        return positions, torch.tensor([[1 + int(positions.max()) - input_ids.shape[1]]])
