"""Running services of models with videos, their questions, and questions as users of the SDK write them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import PIL.Image

from lookonce.aio import AsyncClient
from lookonce.common.v1 import common_pb2
from lookonce.content_key import image_digest
from lookonce.generation import Generation, Message, Part
from lookonce.images import ImageRef
from lookonce.videos import Video
from tests.conftest import SERVICE_FLAGS
from tests.in_process_stack import InProcessStack
from tests.parity import offline, videos

MAX_FRAMES = 12


@dataclass(frozen=True, slots=True)
class Chat:
    """One user turn and what `generate` answers."""

    parts: list[videos.Part]
    expected: list[int]


@dataclass(frozen=True, slots=True)
class Served:
    """A family's running services and its questions."""

    stack: InProcessStack
    chats: list[Chat]
    # Distinct images and entries of frames in them.
    num_entries: int
    # Size of frames of 80 × 60 pixels after resizing.
    frame_size: common_pb2.PixelSize

    @property
    def num_encodes(self) -> int:
        """Number of encodes since the services started."""
        return int(self.stack.metric(self.stack.encoders, "lookonce_encoder_encodes_total"))


@contextlib.contextmanager
def served_videos(model: videos.VideoModel) -> Iterator[Served]:
    """Starts the services of a model, and has its reference answer all questions."""
    chats = [Chat(parts, model.question(parts)[0].expected) for parts in videos.questions(model, random.Random(4))]
    limits = (
        "--max-num-batched-tokens",
        "72",
        "--max-num-seqs",
        "12",
        "--max-video-frames-per-prompt",
        str(MAX_FRAMES),
    )
    with InProcessStack(
        model.config.folder,
        dtype="float32",
        encoder_arguments=SERVICE_FLAGS,
        decoder_arguments=(*SERVICE_FLAGS, *limits),
    ) as stack:
        width, height = model.text.family.frame_size(80, 60, 2, None)
        yield Served(stack, chats, len(model.rows), common_pb2.PixelSize(width=width, height=height))


def said(parts: Sequence[videos.Part], *, by_digest: bool = False) -> list[Part]:
    """Returns the parts as a user of the SDK writes them."""

    def image(picture: PIL.Image.Image) -> ImageRef:
        file = videos.png(picture)
        return ImageRef.from_digest(image_digest(file)) if by_digest else ImageRef.from_bytes(file)

    def part_of(part: videos.Part) -> Part:
        if isinstance(part, str):
            return part
        if isinstance(part, PIL.Image.Image):
            return image(part)
        size = part.frames[0].size if by_digest else None
        return Video.from_frames(
            [image(frame) for frame in part.frames], fps=part.fps, max_pixels=part.max_pixels, size=size
        )

    return [part_of(part) for part in parts]


async def answer(target: str, parts: list[Part]) -> Generation:
    """Returns the greedy answer to one user turn."""
    num_tokens = offline.MAX_NEW_TOKENS
    async with AsyncClient.connect(target) as client:
        return await client.generate(
            [Message("user", parts)], max_tokens=num_tokens, min_tokens=num_tokens, temperature=0.0
        )
