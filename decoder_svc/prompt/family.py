"""The decoder's view of a model family: placeholder, token layout of images, positions, mask. Knows no pixels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from decoder_svc.prompt.image_layout import ImageLayout, layout_of
from decoder_svc.prompt.rotary_positions import (
    PlacedGrid,
    canvas_positions,
    mrope_positions,
    sequence_positions,
    xdrope_positions,
)
from decoder_svc.scheduling.prompt import Positions, Span
from lookonce.content_key import ProcessorOptions
from lookonce.errors import ModelFolderError, UnsupportedError
from lookonce.families.base import PositionAxes
from lookonce.families.video import DEFAULT_FPS, video_token
from lookonce.model.family_model import FamilyModel
from lookonce.model.model_folder import ModelFolder, image_token_id

# Number of cached layouts. A chat repeats its images in every turn.
_NUM_LAYOUTS = 256
# Fewest frames of a video.
_FEWEST_FRAMES = 2


class DecoderFamily:
    """The family of one model; safe to use from several threads at once."""

    def __init__(
        self,
        model: FamilyModel,
        image_token: str,
        image_token_id: int,
        placeholder_id: int | None,
        video_token: str | None,
        encode: Callable[[str], Sequence[int]],
    ) -> None:
        """`encode` tokenizes trusted text without adding special tokens. `video_token` None: videos are refused.

        Raises ModelFolderError if the tokenizer cannot encode the text between an image's rows.
        """
        data = model.data
        self.model = model
        self._encode = encode
        self.title = data.title
        # The token of which each occurrence takes one embedding row.
        self.image_token = image_token
        self.image_token_id = image_token_id
        # The placeholder of one image in a rendered prompt, and its token id; None if the placeholder is plain text.
        self.placeholder = data.placeholder(model.source) or image_token
        self.placeholder_id = placeholder_id
        self._video_token = video_token or ""
        self._video = None if video_token is None else model.video
        # The reason why videos are refused; empty if they are accepted.
        self.no_video_reason = model.no_video_reason or (
            "the tokenizer has no video token" if video_token is None else ""
        )
        # The placeholder of one video in a rendered prompt; None: videos are refused.
        self.video_placeholder = None if self._video is None else self._video.placeholder(self._video_token)
        # Frames in an entry of the cache; 0: videos are refused.
        self.frames_per_entry = 0 if self._video is None else self._video.frames_per_entry
        self.num_position_axes = data.axes.num_axes
        self._canvas_markers = model.marker_ids(encode)
        self.mask = model.mask
        # Extra feature levels per row.
        self.num_levels = model.num_levels
        # Tokens that the language model sends to the experts of images.
        self.image_expert_ids = data.image_expert_ids(model.source.config)
        # Tokens that count as padding where they have no row, and where layers look tokens up; None: layers look
        # nothing up.
        self.padded_input_ids = data.padded_input_ids(model.source.config)
        self.finish_text = data.finish_text
        # Text before the k-th image's expansion, counted from 0.
        self.opening = functools.partial(data.opening, model.source)
        # Text between an image and what follows, and its tokens in a prompt of token ids.
        self.closing = data.closing
        self.closing_ids = tuple(encode(text)) if (text := data.closing("")) else ()
        # Whether an image is processed differently if its prompt has several.
        self.depends_on_image_count = data.depends_on_image_count
        self._layout = functools.lru_cache(_NUM_LAYOUTS)(self._new_layout)
        try:
            largest = layout_of(model.sizing.largest, image_token, image_token_id, encode)
            if self._video is not None:
                self.video_layouts(self._video.unit, _FEWEST_FRAMES, DEFAULT_FPS)
        except ValueError as error:
            raise ModelFolderError(f"the tokenizer does not fit {data.title}: {error}") from error
        # Size of the largest image or entry of frames that the processor can make: its rows, and its tokens from the
        # first one with a row to the last.
        self.max_rows_per_image = max(largest.num_rows, 0 if self._video is None else self._video.most_rows)
        self.max_tokens_per_image = max(largest.span_length, self.max_rows_per_image)

    def check_options(self, options: ProcessorOptions) -> None:
        """Raises InvalidParameterError for options that the model does not support and values out of range."""
        self.model.check_options(options)

    def image_layout(self, width: int, height: int, options: ProcessorOptions) -> ImageLayout:
        """Returns the layout of an upright image of this size in pixels.

        Raises ImageTooLargeError for a size that the model does not support, InvalidParameterError for wrong options.
        """
        return self._layout(width, height, options)

    def opening_ids(self, number: int) -> Sequence[int]:
        """Returns the tokens of `opening` in a prompt of token ids."""
        text = self.opening(number)
        return self._encode(text) if text else ()

    def frame_size(self, width: int, height: int, num_frames: int, max_pixels: int | None) -> tuple[int, int]:
        """Returns the width and height to which a video's frames of this size in pixels are resized.

        Raises UnsupportedError if videos are refused, InvalidParameterError for a wrong `max_pixels`, and
        ImageTooLargeError.
        """
        if self._video is None:
            raise UnsupportedError(f"{self.no_video_reason}; send single images")
        return self.model.frame_size(width, height, num_frames, max_pixels)

    def num_entries(self, num_frames: int) -> int:
        """Returns the largest number of entries of videos with `num_frames` frames in total; 0 if videos are refused.

        Of pairs, videos of three frames are the worst case, with two pairs each.
        """
        if self.frames_per_entry < 2:
            return num_frames * self.frames_per_entry
        return -(-num_frames * 2 // 3)

    def video_layouts(self, frame_size: tuple[int, int], num_frames: int, fps: float) -> list[ImageLayout]:
        """Returns the layout of each entry of frames; together they replace the video's placeholder."""
        assert self._video is not None, "frame_size() comes first"
        shapes = self._video.shapes(frame_size, num_frames, fps)
        token, token_id = self._video_token, self._video.token_id
        if self._video.takes_image_token or token_id is None:
            token, token_id = self.image_token, self.image_token_id
        return [layout_of(shape, token, token_id, self._encode) for shape in shapes]

    def level_arguments(self, has_row: Any, levels: Sequence[Any]) -> Mapping[str, Any]:
        """Returns the arguments with which the language model adds feature levels; see `Family.level_arguments`."""
        return self.model.data.level_arguments(self.model.source.config, has_row, levels)

    def positions(
        self, token_ids: Sequence[int], spans: Sequence[Span], layouts: Sequence[ImageLayout]
    ) -> Positions | None:
        """Returns the rotary positions of an expanded prompt; None for 0, 1, 2, …"""
        axes, num_tokens = self.model.data.axes, len(token_ids)
        if axes is PositionAxes.SEQUENCE:
            return sequence_positions(num_tokens, self.model.data.first_position)
        placed = zip(spans, layouts, strict=True)
        grids = [
            PlacedGrid(span, layout.grid, layout.place, layout.slices)
            for span, layout in placed
            if layout.grid is not None
        ]
        if axes is PositionAxes.CANVAS:
            return canvas_positions(token_ids, grids, self._canvas_markers)
        return (mrope_positions if axes is PositionAxes.MROPE else xdrope_positions)(num_tokens, grids)

    def num_last_markers(self, token_ids: Sequence[int], spans: Sequence[Span]) -> int | None:
        """Returns how many markers end a prompt behind its last image; None if it ends otherwise.

        In families with a canvas, a marker there would have another position in the prompt than in the answer.
        """
        behind = token_ids[spans[-1].stop :] if spans and self._canvas_markers else None
        return None if behind is None or not self._canvas_markers.issuperset(behind) else len(behind)

    def _new_layout(self, width: int, height: int, options: ProcessorOptions) -> ImageLayout:
        shape = self.model.image_shape(width, height, options)
        return layout_of(shape, self.image_token, self.image_token_id, self._encode)


def load_family(folder: ModelFolder, tokenizer: Any) -> DecoderFamily:
    """Loads the family of a model folder; `tokenizer` is the folder's fast tokenizer of transformers.

    Raises ModelFolderError if the tokenizer or config.json does not name the image token.
    """
    token_id = image_token_id(folder.config)
    if token_id is None:
        raise ModelFolderError("config.json names no image token (image_token_index or image_token_id)")
    token = tokenizer.convert_ids_to_tokens(int(token_id))
    if token is None:
        raise ModelFolderError(f"the tokenizer has no token with the image token's id {token_id}")
    model = FamilyModel.load(folder)
    placeholder = model.data.placeholder(model.source)
    placeholder_id = int(token_id) if placeholder is None else tokenizer.get_vocab().get(placeholder)

    def encode(text: str) -> Sequence[int]:
        ids: Sequence[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    token_of_videos = None if model.video is None else video_token(model.video, tokenizer)
    return DecoderFamily(model, str(token), int(token_id), placeholder_id, token_of_videos, encode)
