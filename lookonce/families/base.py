"""The types of a family's data file. No torch, no transformers, no pixels.

A family defines the expansion of an image's placeholder (`ImageShape`, from the image's size alone), the positions on
the rotary axes, the attention mask (`Mask`) and the arguments of the vision half. Everything else is shared code.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lookonce.content_key import ProcessorOptions


class Mask(enum.Enum):
    """The attention mask among the tokens of a prompt."""

    # Every token sees itself and those before it.
    CAUSAL = "causal"
    # Causal, and the rows of one image see each other; in layers with a window only within it.
    IMAGE = "image"
    # All tokens of the prompt see each other, even beyond a layer's window; generated tokens are causal.
    PROMPT = "prompt"


class PositionAxes(enum.Enum):
    """The numbering of rotary positions."""

    # One axis, counted up from `Family.first_position`.
    SEQUENCE = "sequence"
    # Time, height and width: text advances all three, an image spans its grid (M-RoPE, arXiv:2409.12191, section 2.1).
    MROPE = "mrope"
    # The place in the prompt, and in an image's grid also the column, the line and the image's number, all counted from
    # zero; elsewhere the place on all four (XD-RoPE, arXiv:2511.19575).
    XDROPE = "xdrope"
    # Those of M-RoPE, but an image's slices lie on a canvas, over which its whole view is stretched, and the markers
    # between them lie at the slices' corners (MiniCPM-V 4.7).
    CANVAS = "canvas"

    @property
    def num_axes(self) -> int:
        """Returns how many numbers make up the position of a token."""
        return {PositionAxes.SEQUENCE: 1, PositionAxes.XDROPE: 4}.get(self, 3)


@dataclass(frozen=True, slots=True)
class FramePlace:
    """The place of a pair of frames within its video, in families whose pairs share one time axis."""

    # Number of the pair; 0 starts the video.
    index: int
    # Position on the time axis, relative to the first pair.
    time: int


@dataclass(frozen=True, slots=True)
class SliceGrid:
    """The slices of an image, line by line, all of one size."""

    lines: int
    columns: int
    # Rows of a slice, from top to bottom and from left to right.
    height: int
    width: int


@dataclass(frozen=True, slots=True)
class SharedRow:
    """A token whose row is the same in every image, in families whose vision half embeds marker tokens."""

    # The token as text.
    text: str
    # Index into `Family.shared_rows`.
    index: int


@dataclass(frozen=True, slots=True)
class ImageShape:
    """The expansion of one image's placeholder in a prompt."""

    # In order: texts, whose tokens take no rows, tokens that take a shared row, and numbers of tokens that take the
    # next rows.
    parts: tuple[str | int | SharedRow, ...]
    # Merged patches (frames, height, width); None if positions do not depend on them.
    grid: tuple[int, int, int] | None = None
    # Set for a pair of frames that shares a time axis with others; None: positions are an image's.
    place: FramePlace | None = None
    # Rows at the end of the embedding that this prompt does not show.
    num_unused_rows: int = 0
    # The slices behind the whole image, whose rows are `grid`; None if there are none or positions do not depend on
    # them.
    slices: SliceGrid | None = None

    def text(self, image_token: str) -> str:
        """Returns the expansion with one image token for each number of rows."""
        texts = (part.text if isinstance(part, SharedRow) else part for part in self.parts)
        return "".join(image_token if isinstance(text, int) else text for text in texts)

    @property
    def num_rows(self) -> int:
        """Number of rows that the prompt shows."""
        return sum(part for part in self.parts if isinstance(part, int)) + len(self.shared_rows)

    @property
    def shared_rows(self) -> dict[int, int]:
        """Places of shared rows among all rows, ascending, and their indexes."""
        places: dict[int, int] = {}
        place = 0
        for part in self.parts:
            if isinstance(part, SharedRow):
                places[place] = part.index
            place += part if isinstance(part, int) else isinstance(part, SharedRow)
        return places


@dataclass(frozen=True, slots=True)
class ImageSizing:
    """The mapping from image size to expansion, as one model's image processor computes it."""

    # Maps (width, height, options) of an upright image in pixels to its expansion. Raises ValueError for a size that
    # the processor refuses.
    shape: Callable[[int, int, ProcessorOptions], ImageShape]
    # Expansion of the image with the most rows.
    largest: ImageShape


@dataclass(frozen=True, slots=True)
class FamilySource:
    """The files of a model folder from which a family's rules are read."""

    # config.json as transformers reads it, with defaults.
    config: Any
    # The folder's image processor, in the variant that needs no torchvision if there is one.
    processor: Any
    # processor_config.json without its nested processors; empty when there is none.
    settings: Mapping[str, Any]
    # Special tokens of the tokenizer by name (boi_token, …), as text.
    tokens: Mapping[str, str]
    # Settings of the folder's video processor; empty if there are none.
    video: Mapping[str, Any] = field(default_factory=dict)


def _same_text(token: str) -> str:
    return token


def _no_surrounding_text(_seconds: float) -> tuple[str, str]:
    return "", ""


def _middle(first: int, last: int) -> float:
    return (first + last) / 2


def _no_frame_cap(_source: FamilySource) -> int | None:
    return None


def _no_time_axis(_config: Any, _seconds: float) -> float | None:
    return None


@dataclass(frozen=True, slots=True)
class PairRule:
    """A family's rules for videos whose frames are encoded in pairs (frame_pairs.py)."""

    # Settings of the video processor in transformers, used if a folder does not set them.
    defaults: Mapping[str, Any]
    # Maps (settings, width, height, number of frames, largest number of pixels per frame) to (height, width) after
    # resizing. Raises ValueError for a size that the processor refuses.
    frame_size: Callable[[Any, int, int, int, int | None], tuple[int, int]]
    # Maps a video's number of frames to the number of frames that share the processor's pixel bounds.
    bounded_frames: Callable[[int], int]
    # Maps the video token that the chat template writes to the text that the pairs replace.
    placeholder: Callable[[str], str] = _same_text
    # Maps a pair's time in seconds to the text before and after its rows.
    surrounding_text: Callable[[float], tuple[str, str]] = _no_surrounding_text
    # Maps the numbers of a pair's frames to the number of the frame whose time is the pair's.
    timed_frame: Callable[[int, int], float] = _middle
    # Whether rows take the place of the token of images; otherwise of that of videos.
    takes_image_token: bool = False
    # Settings that the family's whole processor sets, whatever those of the folder's video processor are.
    overrides: Mapping[str, Any] = field(default_factory=dict)
    # Most pixels of a frame, whatever the bounds of the whole video are; None: there is no such limit.
    frame_cap: Callable[[FamilySource], int | None] = _no_frame_cap
    # Maps (configuration, seconds between pairs) to steps on the time axis; None: a pair is positioned like an image.
    time_steps: Callable[[Any, float], float | None] = _no_time_axis


@dataclass(frozen=True, slots=True)
class FrameSizing:
    """The mapping from a frame's size to its rows, as one model's processor computes it."""

    # Maps (width, height) of an upright frame in pixels to (width, height) of the pixels that the tower sees. Raises
    # ValueError for a size that the processor refuses.
    size: Callable[[int, int], tuple[int, int]]
    # Width and height are multiples of these.
    unit: tuple[int, int]
    # Rows of one unit, and the most units that a frame has.
    rows_per_unit: int = 1
    most_units: int = 1


def _no_frame_text(_source: FamilySource, _index: int, _num_frames: int, _fps: float) -> tuple[str, str]:
    return "", ""


def _no_video_text(_source: FamilySource) -> str | None:
    return None


def _own_processor(source: FamilySource) -> Any:
    return source.processor


@dataclass(frozen=True, slots=True)
class FrameRule:
    """A family's rules for videos whose frames are encoded one by one, like images (single_frames.py)."""

    # Settings of the video processor in transformers, used if a folder does not set them.
    defaults: Mapping[str, Any]
    # Maps (source, settings) to the sizes of frames. Raises ValueError for settings that the tower cannot take.
    sizing: Callable[[FamilySource, Mapping[str, Any]], FrameSizing]
    # Maps the settings to arguments of the processor, beside those that all processors have.
    arguments: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    # Returns the image processor that treats frames.
    processor: Callable[[FamilySource], Any] = _own_processor
    # Whether the vision half has a method of its own for videos, `get_video_features`.
    has_video_method: bool = False
    # Text that the chat template writes for a video, and whose place the frames take; None: the token of videos, which
    # also gives its place to rows. With a text, rows take the place of the token of images.
    placeholder: Callable[[FamilySource], str | None] = _no_video_text
    # Maps (source, number of the frame, number of frames, frames per second) to the text before and after its rows.
    texts: Callable[[FamilySource, int, int, float], tuple[str, str]] = _no_frame_text
    # Rows at the end of each frame that only the last frame of a video shows.
    num_closing_rows: int = 0


def _no_levels(_config: Any) -> int:
    return 0


def _pooled_rows(_half: Any, output: Any) -> Any:
    return output.pooler_output


def _rows_and_deepstack(output: Any) -> Sequence[Any]:
    return [output.pooler_output, *output.deepstack_features]


def _levels_after_first_layers(_config: Any, has_row: Any, levels: Sequence[Any]) -> Mapping[str, Any]:
    return {"visual_pos_masks": has_row[None], "deepstack_visual_embeds": levels}


def _no_shared_rows(_output: Any) -> Any:
    return ()


def _vision_feature_layer(config: Any) -> int | Sequence[int] | None:
    return getattr(config, "vision_feature_layer", None)


def _no_arguments(_source: FamilySource, _options: ProcessorOptions) -> Mapping[str, Any]:
    return {}


def _no_text_settings(_config: Any) -> Mapping[str, Any]:
    return {}


def _one_frame(_source: FamilySource) -> int:
    return 1


def _no_placeholder(_source: FamilySource) -> str | None:
    return None


def _one_copy(_shape: ImageShape, _options: ProcessorOptions) -> int:
    return 1


def _nothing_between(_behind: str | None) -> str:
    return ""


def _no_opening(_source: FamilySource, _number: int) -> str:
    return ""


def _no_ids(_config: Any) -> tuple[int, ...]:
    return ()


def _no_padded_ids(_config: Any) -> None:
    return None


def _no_embedders(_config: Any) -> Mapping[str, range]:
    return {}


def _never(_config: Any) -> bool:
    return False


def _no_markers(_source: FamilySource) -> Mapping[str, int]:
    return {}


def _no_refusal(_source: FamilySource) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Family:
    """One vision-language family: everything in which it differs from the others."""

    # Name, in its authors' spelling.
    title: str
    # Hugging Face model type, and class name in transformers.
    model_type: str
    architecture: str
    # Returns the mapping from image size to rows.
    sizing: Callable[[FamilySource], ImageSizing]
    # Outputs of the image processor that are passed to `get_image_features`, concatenated along the first axis.
    inputs: tuple[str, ...] = ("pixel_values",)
    # Those of `inputs` that are concatenated along the last axis instead, because it counts patches.
    packed_inputs: frozenset[str] = frozenset()
    # Text of one image's placeholder in a rendered prompt; None: the token that takes the rows.
    placeholder: Callable[[FamilySource], str | None] = _no_placeholder
    mask: Mask = Mask.CAUSAL
    # Whether a folder's language model is causal although the family has another mask.
    is_causal: Callable[[Any], bool] = _never
    axes: PositionAxes = PositionAxes.SEQUENCE
    first_position: int = 0
    # Maps the source to the markers around images and slices, and between lines of slices: their texts, and their ids
    # in config.json. In families whose axes are CANVAS, these tokens have no place of their own behind an image.
    canvas_markers: Callable[[FamilySource], Mapping[str, int]] = _no_markers
    # Maps (vision half, output of `get_image_features`) to the rows of all images, in families without levels.
    rows: Callable[[Any, Any], Any] = _pooled_rows
    # Maps the configuration to the number of feature levels that accompany each row (deepstack).
    num_levels: Callable[[Any], int] = _no_levels
    # Maps the output of `get_image_features` to the rows, then each level.
    levels: Callable[[Any], Sequence[Any]] = _rows_and_deepstack
    # Maps the output of `get_image_features` to the rows that all images share.
    shared_rows: Callable[[Any], Any] = _no_shared_rows
    # Maps (configuration, bool tensor [num_tokens] of the tokens with a row, the rows of each level) to the arguments
    # with which the language model adds the levels to its hidden states.
    level_arguments: Callable[[Any, Any, Sequence[Any]], Mapping[str, Any]] = _levels_after_first_layers
    # Maps the configuration to the tower's hidden states from which rows are made; None: the last one, or unknown.
    feature_layers: Callable[[Any], int | Sequence[int] | None] = _vision_feature_layer
    # None: the family takes no videos.
    video: PairRule | FrameRule | None = None
    # Whether requests may limit an image's pixels.
    has_max_pixels: bool = False
    # Number of frames that a still image counts as, if the processor bounds pixels times frames.
    frames_per_image: Callable[[FamilySource], int] = _one_frame
    # The largest `max_patches` of an image processor that is accepted: its number of tiles, in most families.
    most_patches: int = 64
    # Maps a request's options to arguments of the image processor.
    processor_arguments: Callable[[FamilySource, ProcessorOptions], Mapping[str, Any]] = _no_arguments
    # Whether an image is processed differently if its prompt has several images.
    depends_on_image_count: bool = False
    # Maps the whole configuration to those settings of the language model that also influence rows.
    text_settings: Callable[[Any], Mapping[str, Any]] = _no_text_settings
    # Number of copies of an image in its forward pass; only the first copy's rows are used.
    num_copies: Callable[[ImageShape, ProcessorOptions], int] = _one_copy
    # Maps the configuration to the ids of tokens that the language model sends to experts of images; empty if it has
    # none.
    image_expert_ids: Callable[[Any], tuple[int, ...]] = _no_ids
    # Maps the configuration to the ids of tokens that count as padding where they have no row, and where layers look
    # tokens up by themselves; None: layers look nothing up.
    padded_input_ids: Callable[[Any], tuple[int, ...] | None] = _no_padded_ids
    # Maps the configuration to the modules beside the language model that embed some tokens instead of its table: a
    # module's name in the inner model, and the ids of its tokens. A module takes them as `input_ids`.
    embedders: Callable[[Any], Mapping[str, range]] = _no_embedders
    # Maps the configuration to the ids of tokens that the model embeds as token 0 where they have no row.
    ids_embedded_as_0: Callable[[Any], tuple[int, ...]] = _no_ids
    # Maps (rendered text, BOS token) to the text that the model expects; None: the text is not changed.
    finish_text: Callable[[str, str], str] | None = None
    # Maps an image's number among the images of its prompt, counted from 0, to the text before its expansion.
    opening: Callable[[FamilySource, int], str] = _no_opening
    # Maps the text behind an image to the text that the processor inserts between them; None: another image follows.
    closing: Callable[[str | None], str] = _nothing_between
    # Whether its image processor has no variant without torchvision.
    needs_torchvision: bool = False
    # Whether its vision tower is one of timm's. timm imports torchvision.
    needs_timm: bool = False
    # Returns why a folder of this type cannot be served, or None if it can.
    refusal: Callable[[FamilySource], str | None] = _no_refusal

    @property
    def imports_torchvision(self) -> bool:
        """Whether transformers must see torchvision, for the image processor or for the vision tower."""
        return self.needs_torchvision or self.needs_timm

    @property
    def has_levels(self) -> bool:
        """Whether feature levels accompany the rows."""
        return self.num_levels is not _no_levels
