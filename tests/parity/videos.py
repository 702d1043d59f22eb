"""Prompts with videos, built by the product, and the whole model's answers.

The reference's pixels, prompt text and rotary positions are computed here from their definitions: transformers' own
video processors need torchvision, and from 5.3 on its positions and timestamps differ from those of the models'
authors (docs/adr/0010).
"""

from __future__ import annotations

import inspect
import io
import itertools
import json
import pathlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import PIL.Image
import torch

from decoder_svc.prompt.prompt_builder import PromptBuilder, PromptLimits, ResolvedImage
from decoder_svc.prompt.prompt_spec import (
    ChatMessage,
    ChatPrompt,
    ChatRole,
    ImagePart,
    InlineImage,
    TextPart,
    VideoFrame,
    VideoPart,
    VideoSource,
)
from decoder_svc.prompt.video_frames import VideoSplitter, frames_of
from decoder_svc.runner.cpu.runner import CPUModelRunner
from decoder_svc.runner.runner_config import RunnerConfig
from encoder_svc.images.image_inputs import VisionAdapter
from lookonce.content_key import DEFAULT_TENANT, ContentKey, EncoderFingerprint, ProcessorOptions, content_key
from lookonce.image_file import ImageFile, file_digest, files_of
from lookonce.media.image_header import ImageLimits
from lookonce.model.half_model import load_vision_half
from lookonce.model.model_folder import ModelFolder
from tests import tiny_models
from tests.decoder_svc.conftest import loaded
from tests.parity import offline

BLOCK_SIZE = 8
LIMITS = ImageLimits(1 << 24, 1 << 24, 200.0)
MEAN, STD = [0.4, 0.5, 0.6], [0.3, 0.25, 0.2]
# Pixel bounds: of all frames together for Qwen3-VL, of each frame for the others.
LEAST_ROWS, MOST_ROWS = 4, 60
_TEXT, _IMAGE, _VIDEO = 0, 1, 2
# Marks the rows of videos, so that they are not taken for a placeholder.
_ROW = "<|video_row|>"


@dataclass(frozen=True, slots=True)
class Video:
    """A video: frames of one size and their speed."""

    frames: list[PIL.Image.Image]
    fps: float = 2.0
    max_pixels: int | None = None


Part = str | PIL.Image.Image | Video


def frames(seed: int, number: int, width: int = 80, height: int = 60) -> list[PIL.Image.Image]:
    """Returns different images of one size."""
    return [tiny_models.random_image(100 * seed + index, width, height) for index in range(number)]


def png(image: PIL.Image.Image) -> bytes:
    """Returns the file that a client sends for a frame."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


class VideoModel:
    """One family's tiny model: our two halves, and the whole model as the reference."""

    def __init__(self, family: ModuleType, folder: pathlib.Path) -> None:
        family.build(folder)
        self.processor: Any = family.load_processor(folder)
        images = self.processor.image_processor
        self.patch, self.merge = images.patch_size, images.merge_size
        self.square = (self.patch * self.merge) ** 2
        size = {"shortest_edge": LEAST_ROWS * self.square, "longest_edge": MOST_ROWS * self.square}
        settings = {"size": size, "image_mean": MEAN, "image_std": STD, "temporal_patch_size": 2}
        (folder / "video_preprocessor_config.json").write_text(json.dumps(settings))
        self.name = family.NAME
        self.text = loaded(folder)
        self.adapter = VisionAdapter.load(ModelFolder.open(folder))
        self.splitter = VideoSplitter(self.text.family, LIMITS)
        limits = PromptLimits(4000, 8, self.text.vocab_size, 64)
        self.builder = PromptBuilder(self.text.tokenizer, self.text.template, self.text.family, limits)
        self.reference: Any = tiny_models.load_model(folder)
        if self.has_clock:
            self.reference.model.get_rope_index = self._positions
        if self.is_glm:
            # transformers 5.23 takes the rows of videos for those of images if a prompt has both.
            self.reference.model.get_placeholder_mask = self._placeholder_masks
        self._vision = load_vision_half(folder, torch.float32)
        self.rows: dict[ContentKey, torch.Tensor] = {}
        self.config = RunnerConfig(folder, torch.float32, block_size=BLOCK_SIZE, num_threads=1)
        self._steps: list[float] = []

    @property
    def has_clock(self) -> bool:
        """Whether the pairs of a video share a time axis; otherwise each has its time as text."""
        return not ("qwen3" in self.name or self.is_glm)

    @property
    def is_glm(self) -> bool:
        """Whether pairs of frames have the token of images."""
        return "glm" in self.name

    def offline_model(self, questions: Sequence[offline.Question]) -> offline.OfflineModel:
        """Returns the model for sessions of scheduler and runner."""
        ends = self.reference.generation_config.eos_token_id
        runner = CPUModelRunner(self.config, self.text.family)
        return offline.OfflineModel(
            runner, list(questions), self.rows, frozenset(ends if isinstance(ends, list) else [ends])
        )

    def question(self, parts: Sequence[Part]) -> tuple[offline.Question, list[int]]:
        """Returns the product's prompt with the reference's answer, and the reference's prompt ids."""
        inputs = self._inputs(parts)
        num_tokens = offline.MAX_NEW_TOKENS
        with torch.inference_mode():
            output = self.reference.generate(
                **inputs, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False
            )
        ids = inputs["input_ids"][0].tolist()
        return offline.Question(self.prompt(parts), output[0, len(ids) :].tolist()), ids

    def prompt(self, parts: Sequence[Part]) -> Any:
        """Builds the prompt from a chat as the decoder does."""
        spec = ChatPrompt((ChatMessage(ChatRole.USER, tuple(map(_said, parts))),))
        self.builder.check(spec)
        frames = [frame.data for _, frame in frames_of(spec.visuals)]
        facts = [None if data is None else self.splitter.read(data) for data in frames]
        videos = self.splitter.split_all(spec.visuals, facts)
        resolved = [self._resolved(source) for source in self.builder.image_sources(spec, videos)]
        return self.builder.build(spec, resolved, videos)

    def _resolved(self, source: Any) -> ResolvedImage:
        assert isinstance(source, InlineImage)
        key = content_key(file_digest(source.data), EncoderFingerprint(self.name), source.options, DEFAULT_TENANT)
        images = _opened(source.data)
        if key not in self.rows:
            with torch.inference_mode():
                if source.options.frame_size is None:
                    inputs = self.adapter.pixel_inputs(images[0], source.options)
                else:
                    inputs = self.adapter.pair_inputs(images, source.options)
                self.rows[key] = self.adapter.image_rows(self._vision, [inputs])[0].float().contiguous()
        return ResolvedImage(key, *images[0].size, source.options, source.data)

    def _inputs(self, parts: Sequence[Part]) -> dict[str, Any]:
        """Returns the arguments of the whole model's `generate`."""
        content = [{"type": "text", "text": part} if isinstance(part, str) else {"type": _type(part)} for part in parts]
        text = self.processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        videos = [part for part in parts if isinstance(part, Video)]
        images = [part for part in parts if isinstance(part, PIL.Image.Image)]
        inputs: dict[str, Any] = {}
        if images:
            inputs |= self.processor.image_processor(images=images, return_tensors="pt")
        pixels, grids = [], []
        for video in videos:
            size = self._frame_size(video)
            pixels.append(self._patches(video, size))
            grids.append([-(-len(video.frames) // 2), size[1] // self.patch, size[0] // self.patch])
            text = self._with_video(text, video, grids[-1])
        image = "<|image|>" if self.is_glm else "<|image_pad|>"
        for grid in inputs.get("image_grid_thw", torch.zeros(0, 3)).tolist():
            num_rows = grid[1] * grid[2] // self.merge**2
            text = text.replace(image, "<|placeholder|>" * int(num_rows), 1)
        text = text.replace("<|placeholder|>", image).replace(_ROW, image if self.is_glm else "<|video_pad|>")
        ids = self.processor.tokenizer(text, return_tensors="pt")["input_ids"]
        types = self._types(ids)
        inputs |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if "mm_token_type_ids" in inspect.signature(self.reference.forward).parameters:
            inputs["mm_token_type_ids"] = types
        if videos:
            inputs["pixel_values_videos"] = torch.cat(pixels)
            inputs["video_grid_thw"] = torch.tensor(grids)
        self._steps = [self._step(video) for video in videos]
        return inputs

    def _frame_size(self, video: Video) -> tuple[int, int]:
        """Returns (width, height) by the rule in each family's paper and published processor."""
        width, height = video.frames[0].size
        factor = self.patch * self.merge
        share = 1 if self.has_clock else len(video.frames)
        least, most = LEAST_ROWS * self.square / share, MOST_ROWS * self.square / share
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
            written = text.replace("<|video_pad|>", rows * grid[0], 1)
        elif self.is_glm:
            times = [2 * pair / video.fps for pair in range(grid[0])]
            names = [f"{time:.1f} seconds" if self.name == "glm46v" else str(int(time)) for time in times]
            said = [f"<|begin_of_image|>{rows}<|end_of_image|>{name}" for name in names]
            written = text.replace("<|video|>", "".join(said), 1)
        else:
            said = []
            for pair in range(grid[0]):
                times = [2 * pair, min(2 * pair + 1, len(video.frames) - 1)]
                said.append(f"<{sum(times) / 2 / video.fps:.1f} seconds><|vision_start|>{rows}<|vision_end|>")
            written = text.replace("<|vision_start|><|video_pad|><|vision_end|>", "".join(said), 1)
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


def _type(part: PIL.Image.Image | Video) -> str:
    return "video" if isinstance(part, Video) else "image"


def _said(part: Part) -> TextPart | ImagePart | VideoPart:
    if isinstance(part, str):
        return TextPart(part)
    if isinstance(part, Video):
        files = tuple(VideoFrame(png(frame)) for frame in part.frames)
        return VideoPart(VideoSource(files, part.fps, part.max_pixels))
    return ImagePart(InlineImage(png(part), ProcessorOptions()))


def _opened(file: ImageFile) -> list[PIL.Image.Image]:
    return [PIL.Image.open(io.BytesIO(data)).convert("RGB") for data in files_of(file)]


def questions(model: VideoModel, rng: random.Random) -> list[list[Part]]:
    """Returns prompts with short and long, odd, slow and fast, and elongated videos, two at once, and with images."""

    def say() -> str:
        return " ".join(rng.choices(offline.WORDS, k=rng.randint(3, 9)))

    picture = tiny_models.random_image(5, 80, 60)
    few = 9 * model.square
    return [
        [Video(frames(1, 2)), say()],
        [say(), Video(frames(2, 5), fps=1.0), say()],
        [Video(frames(3, 8), fps=8.0), say()],
        [Video(frames(4, 3, 140, 56), fps=29.97), picture, say()],
        [picture, say(), Video(frames(1, 2)), Video(frames(5, 4, 60, 140), fps=0.5), say()],
        [Video(frames(6, 6), max_pixels=few), say()],
        [Video(frames(7, 4, 300, 40)), say(), picture],
        [Video([*frames(1, 2), *frames(8, 2)]), say()],
        [Video([*frames(8, 2), *frames(1, 2)]), say()],
        [say()],
    ]
