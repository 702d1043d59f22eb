"""The reference of videos as single frames: pixels and texts as the processors of transformers define them.

Those processors need torchvision. Here, PIL resizes the frames, and NumPy does the rest, except for a family whose
images need torchvision, too.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import num2words
import numpy as np
import PIL.Image
import torch

from tests.parity import videos
from tests.parity.videos import MEAN, STD, Part, Video
from tests.tiny_families import idefics3, internvl, llava_next_video, llava_onevision, perception_lm, video_llava

# Mark the rows of images and videos, so that they are not taken for a placeholder.
_IMAGE_ROW, _VIDEO_ROW = "<|image_row|>", "<|video_row|>"
_Picture = PIL.Image.Image
_BICUBIC, _LANCZOS = PIL.Image.Resampling.BICUBIC, PIL.Image.Resampling.LANCZOS


class FrameModel(videos.VideoModel):
    """A model that encodes frames one by one. Subclasses have the definitions of a family."""

    # Options of the image processor that the whole processor sets.
    image_options: ClassVar[dict[str, Any]]

    def inputs(self, parts: Sequence[Part]) -> dict[str, Any]:
        """Returns the arguments of the whole model's `generate`."""
        text = self.rendered(parts)
        shown = [part for part in parts if isinstance(part, Video)]
        images = [part for part in parts if isinstance(part, PIL.Image.Image)]
        found: dict[str, Any] = {}
        if images:
            found = dict(self.processor.image_processor(images=[images], return_tensors="pt", **self.image_options))
            for index in range(len(images)):
                expansion = self.processor.replace_image_token(found, index)
                text = text.replace(
                    self.processor.image_token, expansion.replace(self.processor.image_token, _IMAGE_ROW), 1
                )
        for video in shown:
            assert self.processor.video_token in text
            text = text.replace(self.processor.video_token, self.said(video), 1)
        text = text.replace(_IMAGE_ROW, self.processor.image_token).replace(_VIDEO_ROW, self.row_token)
        ids = self.processor.tokenizer(text, return_tensors="pt")["input_ids"]
        pixels = self.pixels(found, [part for part in parts if not isinstance(part, str)])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **pixels, **self.types(ids)}

    @property
    def row_token(self) -> str:
        """The token whose place the rows of frames take."""
        return str(self.processor.video_token)

    def said(self, video: Video) -> str:
        """Returns the text of a video, with _VIDEO_ROW for each row."""
        raise NotImplementedError

    def pixels(self, found: dict[str, Any], visuals: Sequence[_Picture | Video]) -> dict[str, Any]:
        """Returns the arguments with pixels; `found` is the image processor's output for the images."""
        raise NotImplementedError

    def types(self, _ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns further arguments about the tokens."""
        return {}


class _VideoMethodModel(FrameModel):
    """A family whose model has a method for videos, which takes several only if they have equally many frames."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._shown: list[torch.Tensor] = []
        self._features: Callable[..., Any] = self.reference.model.get_video_features
        self.reference.model.get_video_features = self._each

    def _each(self, pixel_values_videos: torch.Tensor, **options: Any) -> Any:
        """Stands for `get_video_features`, whose arguments `generate` finds by their names."""
        assert len(pixel_values_videos)
        outputs = [self._features(video[None], **options) for video in self._shown]
        outputs[0].pooler_output = torch.cat([output.pooler_output.flatten(0, 1) for output in outputs])[None]
        return outputs[0]

    def pixels(self, found: dict[str, Any], visuals: Sequence[_Picture | Video]) -> dict[str, Any]:
        """Returns the arguments with pixels."""
        self._shown = [
            torch.stack([_normal(self.sized(frame)) for frame in video.frames])
            for video in visuals
            if isinstance(video, Video)
        ]
        names = ("pixel_values", "image_sizes", "batch_num_images")
        given = {name: found[name] for name in names if name in found}
        return given | ({"pixel_values_videos": self._shown[0][None]} if self._shown else {})

    def sized(self, frame: _Picture) -> _Picture:
        """Returns the frame as the tower sees it."""
        raise NotImplementedError


class OneVision(_VideoMethodModel):
    """LLaVA-OneVision: squares, a quarter of the rows of an image, and a newline row behind the last frame."""

    side = llava_onevision.SIDE
    has_visuals_first = True
    image_options: ClassVar[dict[str, Any]] = {}

    def video_settings(self) -> dict[str, Any]:
        """Returns settings that fit the tiny model."""
        return {"size": {"height": self.side, "width": self.side}}

    def said(self, video: Video) -> str:
        """Returns the text of a video, with a mark for each row."""
        per_side = math.ceil(self.side / llava_onevision.PATCH / 2)
        return _VIDEO_ROW * (len(video.frames) * per_side**2 + 1)

    def sized(self, frame: _Picture) -> _Picture:
        """Returns the frame as the tower sees it."""
        return frame.resize((self.side, self.side), _BICUBIC)


class NextVideo(_VideoMethodModel):
    """LLaVA-NeXT-Video: the middle square of a frame, and a quarter of the rows of an image."""

    side = llava_next_video.SIDE
    image_options: ClassVar[dict[str, Any]] = {}

    def video_settings(self) -> dict[str, Any]:
        """Returns settings that fit the tiny model."""
        return {"size": {"shortest_edge": self.side}, "crop_size": {"height": self.side, "width": self.side}}

    def said(self, video: Video) -> str:
        """Returns the text of a video, with a mark for each row."""
        return _VIDEO_ROW * (len(video.frames) * (self.side // llava_next_video.PATCH) ** 2 // 4)

    def sized(self, frame: _Picture) -> _Picture:
        """Returns the frame as the tower sees it."""
        shorter = min(frame.size)
        width, height = (int(self.side * side / shorter) for side in frame.size)
        left, top = (width - self.side) // 2, (height - self.side) // 2
        return frame.resize((width, height), _BICUBIC).crop((left, top, left + self.side, top + self.side))


class VideoLlava(NextVideo):
    """Video-LLaVA: the middle square of a frame, with the rows of an image and a class row."""

    side = video_llava.SIDE
    image_options: ClassVar[dict[str, Any]] = {"return_legacy_image_output": False}

    def said(self, video: Video) -> str:
        """Returns the text of a video, with a mark for each row."""
        return _VIDEO_ROW * (len(video.frames) * ((self.side // video_llava.PATCH) ** 2 + 1))


class Intern(FrameModel):
    """InternVL: a frame is a tile with its number before it."""

    image_options: ClassVar[dict[str, Any]] = {"crop_to_patches": True}

    def video_settings(self) -> dict[str, Any]:
        """Returns settings that fit the tiny model."""
        return {"size": {"height": internvl.TILE, "width": internvl.TILE}}

    @property
    def row_token(self) -> str:
        """The token of images, as for tiles."""
        return str(self.processor.image_token)

    def said(self, video: Video) -> str:
        """Returns the text of a video, with a mark for each row."""
        rows = _VIDEO_ROW * internvl.ROWS_PER_TILE
        return "\n".join(f"Frame{number}: <img>{rows}</img>" for number in range(1, len(video.frames) + 1))

    def pixels(self, found: dict[str, Any], visuals: Sequence[_Picture | Video]) -> dict[str, Any]:
        """Returns the arguments with pixels."""
        tiles: list[torch.Tensor] = []
        of_images = iter(found["pixel_values"].split(list(found["num_patches"])) if found else [])
        for visual in visuals:
            if isinstance(visual, Video):
                sized = [frame.resize((internvl.TILE, internvl.TILE), _BICUBIC) for frame in visual.frames]
                tiles.append(torch.stack([_normal(frame) for frame in sized]))
            else:
                tiles.append(next(of_images))
        return {"pixel_values": torch.cat(tiles)} if tiles else {}


class Smol(FrameModel):
    """SmolVLM: a frame is a tile with its time before it, and the number of frames is written in words."""

    image_options: ClassVar[dict[str, Any]] = {"return_row_col_info": True}
    longest = 3 * idefics3.TILE

    def video_settings(self) -> dict[str, Any]:
        """Returns settings that fit the tiny model."""
        return {"size": {"longest_edge": self.longest}, "max_image_size": {"longest_edge": idefics3.TILE}}

    @property
    def row_token(self) -> str:
        """The token of images, as for tiles."""
        return str(self.processor.image_token)

    def said(self, video: Video) -> str:
        """Returns the text of a video, with a mark for each row."""
        number = num2words.num2words(len(video.frames))
        duration = datetime.timedelta(seconds=int(len(video.frames) / video.fps))
        text = f"You are provided the following series of {number} frames from a {duration} [H:MM:SS] video.\n"
        mark, rows = "<fake_token_around_image>", _VIDEO_ROW * idefics3.ROWS_PER_TILE
        for index in range(len(video.frames)):
            minutes, seconds = divmod(int(index / video.fps), 60)
            text += f"\nFrame from {minutes:02d}:{seconds:02d}:{mark}<global-img>{rows}{mark}"
        return text + "\n\n"

    def pixels(self, found: dict[str, Any], visuals: Sequence[_Picture | Video]) -> dict[str, Any]:
        """Returns the arguments with pixels."""
        tiles: list[torch.Tensor] = []
        counts = (
            [
                max(1, rows * columns + (rows * columns > 0))
                for rows, columns in zip(*(found[name][0] for name in ("rows", "cols")), strict=True)
            ]
            if found
            else []
        )
        of_images = iter(found["pixel_values"][0][: sum(counts)].split(counts) if found else [])
        for visual in visuals:
            if isinstance(visual, Video):
                tiles.append(torch.stack([_normal(self._sized(frame)) for frame in visual.frames]))
            else:
                tiles.append(next(of_images))
        return {"pixel_values": torch.cat(tiles)[None]} if tiles else {}

    def _sized(self, frame: _Picture) -> _Picture:
        width, height = frame.size
        if width >= height:
            size = self.longest, _even(int(self.longest / (width / height)))
        else:
            size = _even(int(self.longest * (width / height))), self.longest
        return frame.resize(size, _LANCZOS).resize((idefics3.TILE, idefics3.TILE), _LANCZOS)


class Gemma(FrameModel):
    """Gemma 4: as many squares of patches as 70 rows allow, between markers, with the time before."""

    image_options: ClassVar[dict[str, Any]] = {}
    most_rows = 70

    def video_settings(self) -> dict[str, Any]:
        """Returns settings that fit the tiny model."""
        return {"max_soft_tokens": self.most_rows}

    @property
    def unit(self) -> int:
        """Pixels along a side of the square that becomes a row."""
        images = self.processor.image_processor
        return int(images.patch_size * images.pooling_kernel_size)

    def said(self, video: Video) -> str:
        """Returns the text of a video, with a mark for each row."""
        columns, lines = self._grid(*video.frames[0].size)
        rows = _VIDEO_ROW * (columns * lines)
        times = [divmod(int(index / video.fps), 60) for index in range(len(video.frames))]
        return " ".join(f"{minutes:02d}:{seconds:02d} <|image>{rows}<image|>" for minutes, seconds in times)

    def pixels(self, found: dict[str, Any], visuals: Sequence[_Picture | Video]) -> dict[str, Any]:
        """Returns the arguments with pixels."""
        shown = [visual for visual in visuals if isinstance(visual, Video)]
        names = ("pixel_values", "image_position_ids")
        given: dict[str, Any] = {name: found[name] for name in names if name in found}
        if not shown:
            return given
        frames = [self._patches(frame) for video in shown for frame in video.frames]
        return given | {
            "pixel_values_videos": torch.stack([patches for patches, _ in frames]),
            "video_position_ids": torch.stack([places for _, places in frames]),
            "num_frames_per_video": torch.tensor([len(video.frames) for video in shown]),
        }

    def types(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns which tokens are those of images and of videos."""
        config = self.reference.config
        types = (ids == config.image_token_id).long() + 2 * (ids == config.video_token_id).long()
        return {"mm_token_type_ids": types}

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Returns the largest grid of squares that has the proportions and at most 70 of them."""
        scale = math.sqrt(self.most_rows * self.unit**2 / (width * height))
        columns, lines = (math.floor(scale * side / self.unit) for side in (width, height))
        if lines == 0:
            return min(width // height, self.most_rows), 1
        if columns == 0:
            return 1, min(height // width, self.most_rows)
        return columns, lines

    def _patches(self, frame: _Picture) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the patches [most patches, side × side × channels] and their columns and lines, -1 for none."""
        columns, lines = self._grid(*frame.size)
        side = self.processor.image_processor.patch_size
        most = self.most_rows * (self.unit // side) ** 2
        pixels = _normal(frame.resize((columns * self.unit, lines * self.unit), _BICUBIC)).permute(1, 2, 0)
        patches, places = torch.zeros(most, side * side * 3), torch.full((most, 2), -1)
        number = 0
        for line in range(0, pixels.shape[0], side):
            for column in range(0, pixels.shape[1], side):
                patches[number] = pixels[line : line + side, column : column + side].reshape(-1)
                places[number] = torch.tensor([column // side, line // side])
                number += 1
        return patches, places


class GemmaUnified(Gemma):
    """Gemma 4 Unified: the same rows. Pixels are those of transformers' own processor of videos."""

    def pixels(self, found: dict[str, Any], visuals: Sequence[_Picture | Video]) -> dict[str, Any]:
        """Returns the arguments with pixels."""
        from transformers.models.gemma4_unified.video_processing_gemma4_unified import Gemma4UnifiedVideoProcessor

        names = ("pixel_values", "image_position_ids")
        given: dict[str, Any] = {name: found[name] for name in names if name in found}
        shown = [np.stack(list(map(np.asarray, video.frames))) for video in visuals if isinstance(video, Video)]
        if not shown:
            return given
        side = self.processor.image_processor.patch_size
        processor = Gemma4UnifiedVideoProcessor(
            image_mean=MEAN, image_std=STD, patch_size=side, **self.video_settings()
        )
        processed = [processor(videos=[video], do_sample_frames=False, return_tensors="pt") for video in shown]
        joined = ("pixel_values_videos", "video_position_ids")
        return given | {
            **{name: torch.cat([each[name] for each in processed]) for name in joined},
            "num_frames_per_video": torch.tensor(list(map(len, shown))),
        }


class Perception(FrameModel):
    """Perception LM: a frame is a single tile. Pixels are those of transformers' own processor of videos."""

    has_visuals_first = True
    image_options: ClassVar[dict[str, Any]] = {}

    def video_settings(self) -> dict[str, Any]:
        """Returns settings that fit the tiny model."""
        return {"size": {"height": perception_lm.TILE, "width": perception_lm.TILE}}

    def said(self, video: Video) -> str:
        """Returns the text of a video, with a mark for each row."""
        return _VIDEO_ROW * (len(video.frames) * (perception_lm.TILE // perception_lm.PATCH // 2) ** 2)

    def pixels(self, found: dict[str, Any], visuals: Sequence[_Picture | Video]) -> dict[str, Any]:
        """Returns the arguments with pixels."""
        from transformers.models.perception_lm.video_processing_perception_lm import PerceptionLMVideoProcessor

        processor = PerceptionLMVideoProcessor(image_mean=MEAN, image_std=STD, **self.video_settings())
        shown = [np.stack(list(map(np.asarray, video.frames))) for video in visuals if isinstance(video, Video)]
        frames = [
            processor(videos=[video], do_sample_frames=False, return_tensors="pt")["pixel_values_videos"][0]
            for video in shown
        ]
        given = {"pixel_values": found["pixel_values"]} if found else {}
        return given | ({"pixel_values_videos": torch.cat(frames)[None]} if frames else {})


MODELS: dict[str, type[FrameModel]] = {
    "llava_onevision": OneVision,
    "llava_next_video": NextVideo,
    "video_llava": VideoLlava,
    "internvl": Intern,
    "smolvlm": Smol,
    "gemma4": Gemma,
    "gemma4_moe": Gemma,
    "gemma4_unified": GemmaUnified,
    "perception_lm": Perception,
}


def _normal(frame: _Picture) -> torch.Tensor:
    """Returns normalised pixels [channels, height, width]."""
    values = (np.asarray(frame) / 255.0 - np.array(MEAN)) / np.array(STD)
    return torch.tensor(values, dtype=torch.float32).permute(2, 0, 1)


def _even(side: int) -> int:
    return max(1, side + side % 2)
