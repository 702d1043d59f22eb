"""Prompts with videos, built by the product, and the whole model's answers.

The reference's pixels and prompt texts are computed from their definitions, because transformers' own video processors
need torchvision: those of pairs of frames in pair_videos.py, those of single frames in frame_videos.py.
"""

from __future__ import annotations

import abc
import io
import json
import pathlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

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
from decoder_svc.prompt.video_frames import VideoSplitter
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


class VideoModel(abc.ABC):
    """One family's tiny model: our two halves, and the whole model as the reference."""

    # Bound of a frame's pixels that one of the questions sets; None: the family has no such option.
    few_pixels: int | None = None
    # Whether the chat template writes images first, then videos, then texts.
    has_visuals_first = False

    def __init__(self, family: ModuleType, folder: pathlib.Path) -> None:
        family.build(folder)
        self.processor: Any = family.load_processor(folder)
        settings = {"image_mean": MEAN, "image_std": STD, **self.video_settings()}
        (folder / "video_preprocessor_config.json").write_text(json.dumps(settings))
        self.name = family.NAME
        self.text = loaded(folder)
        self.adapter = VisionAdapter.load(ModelFolder.open(folder))
        self.splitter = VideoSplitter(self.text.family, LIMITS)
        limits = PromptLimits(4000, 8, self.text.vocab_size, 64)
        self.builder = PromptBuilder(self.text.tokenizer, self.text.template, self.text.family, limits)
        self.reference: Any = tiny_models.load_model(folder)
        self._vision = load_vision_half(folder, torch.float32)
        self.rows: dict[ContentKey, torch.Tensor] = {}
        self.config = RunnerConfig(folder, torch.float32, block_size=BLOCK_SIZE, num_threads=1)

    @abc.abstractmethod
    def video_settings(self) -> dict[str, Any]:
        """Returns the settings of the folder's video processor, beside those of colours."""

    def offline_model(self, questions: Sequence[offline.Question]) -> offline.OfflineModel:
        """Returns the model for sessions of scheduler and runner."""
        ends = self.reference.generation_config.eos_token_id
        runner = CPUModelRunner(self.config, self.text.family)
        return offline.OfflineModel(
            runner, list(questions), self.rows, frozenset(ends if isinstance(ends, list) else [ends])
        )

    def question(self, parts: Sequence[Part]) -> tuple[offline.Question, list[int]]:
        """Returns the product's prompt with the reference's answer, and the reference's prompt ids."""
        inputs = self.inputs(parts)
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
        frames = [frame.data for _, frame in self.splitter.frames_of(spec.visuals)]
        facts = [None if data is None else self.splitter.read(data) for data in frames]
        videos = self.splitter.split_all(spec.visuals, facts)
        resolved = [self._resolved(source) for source in self.builder.image_sources(spec, videos)]
        return self.builder.build(spec, resolved, videos)

    def rendered(self, parts: Sequence[Part]) -> str:
        """Returns the text of one user's turn, with the placeholders that the chat template writes."""
        content = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": _type_of(part)} for part in parts
        ]
        conversation = [{"role": "user", "content": content}]
        return str(self.processor.apply_chat_template(conversation, add_generation_prompt=True))

    def _resolved(self, source: Any) -> ResolvedImage:
        assert isinstance(source, InlineImage)
        key = content_key(file_digest(source.data), EncoderFingerprint(self.name), source.options, DEFAULT_TENANT)
        images = _opened(source.data)
        if key not in self.rows:
            with torch.inference_mode():
                if source.options.frame_size is None:
                    inputs = self.adapter.pixel_inputs(images[0], source.options)
                else:
                    inputs = self.adapter.frame_inputs(images, source.options)
                self.rows[key] = self.adapter.image_rows(self._vision, [inputs])[0].float().contiguous()
        return ResolvedImage(key, *images[0].size, source.options, source.data)

    @abc.abstractmethod
    def inputs(self, parts: Sequence[Part]) -> dict[str, Any]:
        """Returns the arguments of the whole model's `generate`."""


def _type_of(part: PIL.Image.Image | Video) -> str:
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
    asked: list[list[Part]] = [
        [Video(frames(1, 2)), say()],
        [say(), Video(frames(2, 5), fps=1.0), say()],
        [Video(frames(3, 8), fps=8.0), say()],
        [Video(frames(4, 3, 140, 56), fps=29.97), picture, say()],
        [picture, say(), Video(frames(1, 2)), Video(frames(5, 4, 60, 140), fps=0.5), say()],
        [Video(frames(6, 6), max_pixels=model.few_pixels), say()],
        [Video(frames(7, 4, 300, 40)), say(), picture],
        [Video([*frames(1, 2), *frames(8, 2)]), say()],
        [Video([*frames(8, 2), *frames(1, 2)]), say()],
        [say()],
    ]
    if not model.has_visuals_first:
        return asked
    order = [PIL.Image.Image, Video, str]
    return [sorted(parts, key=lambda part: [isinstance(part, kind) for kind in order].index(True)) for parts in asked]
