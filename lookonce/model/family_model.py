"""Applies a family's rules to one model folder: the rows and tokens of an image of a given size. Loads no weights.

Needs transformers for the folder's configuration and image processor, so only the services and `lookonce doctor` import
this module.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError

from lookonce.content_key import ProcessorOptions
from lookonce.errors import ImageTooLargeError, InvalidParameterError, ModelFolderError, UnsupportedError
from lookonce.families.base import Family, FamilySource, FrameRule, ImageShape, ImageSizing, Mask, PairRule
from lookonce.families.frame_pairs import FramePairs
from lookonce.families.registry import FAMILIES
from lookonce.families.single_frames import SingleFrames
from lookonce.families.video import VideoModel
from lookonce.model.faults.build_faults import in_one_line
from lookonce.model.faults.config_faults import refusal_text
from lookonce.model.model_folder import CONFIGURATION_FAULTS, ModelFolder, read_json_object
from lookonce.model.number_ranges import check_processor_numbers
from lookonce.model.text_support import text_refusal

# Suffix of the keys of tokenizer_config.json that name special tokens.
_TOKEN_SUFFIX = "_token"
_NO_TORCHVISION = (
    "the image processor of this model needs torchvision, which is not installed or cannot be imported: install the "
    "version that fits the installed torch (pip install 'lookonce[torchvision]')"
)
_NO_TIMM = (
    "the vision tower of this model needs timm and torchvision: install timm, and the torchvision that fits the "
    "installed torch (pip install 'lookonce[timm]')"
)
# The settings of the whole processor, which may hold those of its parts, and of the image processor alone.
_PROCESSOR_FILE, _IMAGES_FILE = "processor_config.json", "preprocessor_config.json"
_NESTED = frozenset({"image_processor", "video_processor", "feature_extractor"})


@dataclass(frozen=True, slots=True)
class FamilyModel:
    """One model folder with its family's rules. Thread-safe."""

    data: Family
    source: FamilySource
    sizing: ImageSizing
    # None if the folder takes no videos; `no_video_reason` says why.
    video: VideoModel | None
    no_video_reason: str

    @classmethod
    def load(cls, folder: ModelFolder) -> FamilyModel:
        """Reads configuration and image processor. Raises ModelFolderError if the folder cannot be served."""
        data = FAMILIES[folder.model_type]
        _check_packages(folder, data)
        source = FamilySource(
            config=_config(folder),
            processor=_image_processor(folder, data),
            settings=_settings(folder),
            tokens=_tokens(folder),
            video=_video_settings(folder),
        )
        try:
            refusal = text_refusal(source.config, _mask_of(data, source.config)) or data.refusal(source)
            sizing = None if refusal else data.sizing(source)
            # The tokens that it needs must be there.
            data.opening(source, 0)
        except CONFIGURATION_FAULTS as error:
            raise ModelFolderError(
                f"{folder.path} lacks something that {data.title} needs: {in_one_line(error)}"
            ) from error
        if sizing is None:
            raise ModelFolderError(f"{folder.path} cannot be served: {refusal}")
        return cls(data, source, sizing, *_video(source, data))

    @property
    def mask(self) -> Mask:
        """The attention mask among the tokens of a prompt."""
        return _mask_of(self.data, self.source.config)

    @property
    def num_levels(self) -> int:
        """Number of feature levels that accompany each row."""
        return self.data.num_levels(self.source.config)

    @property
    def most_rows(self) -> int:
        """Rows of the largest image or entry of video frames."""
        return max(self.sizing.largest.num_rows, 0 if self.video is None else self.video.most_rows)

    def marker_ids(self, encode: Callable[[str], Sequence[int]]) -> frozenset[int]:
        """Returns the ids of the markers on a canvas. `encode` tokenizes text without adding special tokens.

        Raises ModelFolderError if the tokenizer has others.
        """
        markers = self.data.canvas_markers(self.source)
        for text, token_id in markers.items():
            if list(encode(text)) != [token_id]:
                raise ModelFolderError(
                    f"the tokenizer does not fit {self.data.title}: {text!r} is not the token {token_id} of config.json"
                )
        return frozenset(markers.values())

    def check_options(self, options: ProcessorOptions) -> None:
        """Raises InvalidParameterError for options that the model does not have and for values out of range."""
        if options.beside_others and not self.data.depends_on_image_count:
            raise InvalidParameterError(
                "beside_others", f"{self.data.title} processes each image independently of others; leave it unset"
            )
        if options.frame_size is not None:
            self._check_frames(options)
        if options.max_pixels is None:
            return
        if not self.data.has_max_pixels:
            raise InvalidParameterError("max_pixels", _no_max_pixels(self.data))
        size, frames = self.source.processor.size, self.data.frames_per_image(self.source)
        least, most = -(-size.shortest_edge // frames), size.longest_edge // frames
        if not least <= options.max_pixels <= most:
            raise InvalidParameterError("max_pixels", f"must be between {least} and {most}, not {options.max_pixels}")

    def frame_size(self, width: int, height: int, num_frames: int, max_pixels: int | None) -> tuple[int, int]:
        """Returns (width, height) in pixels to which the frames of such a video are resized; see `VideoModel`.

        Raises UnsupportedError if the model takes no videos, InvalidParameterError if `max_pixels` is too small, and
        ImageTooLargeError for a size that the processor refuses.
        """
        if self.video is None:
            raise UnsupportedError(f"{self.no_video_reason}; send single images")
        least = self.video.least_pixels(num_frames)
        if max_pixels is not None and least is None:
            raise InvalidParameterError("max_pixels", _no_max_pixels(self.data))
        if max_pixels is not None and least is not None and max_pixels < least:
            raise InvalidParameterError("max_pixels", f"must be at least {least} for this video, not {max_pixels}")
        try:
            return self.video.frame_size(width, height, num_frames, max_pixels)
        except ValueError:
            raise ImageTooLargeError(f"frames of {width}×{height} pixels are too elongated for this model") from None

    def image_shape(self, width: int, height: int, options: ProcessorOptions) -> ImageShape:
        """Returns the expansion of the placeholder of an upright image of this size in pixels.

        Raises ImageTooLargeError for a size that the processor refuses and InvalidParameterError for wrong options.
        """
        self.check_options(options)
        if self.video is not None and options.frame_size is not None:
            return self.video.entry_shape(options.frame_size)
        try:
            return self.sizing.shape(width, height, options)
        except ValueError:
            raise ImageTooLargeError(
                f"an image of {width}×{height} pixels is too elongated or too small for this model"
            ) from None

    def _check_frames(self, options: ProcessorOptions) -> None:
        width, height = options.frame_size or (0, 0)
        if self.video is None:
            raise InvalidParameterError("frame_size", f"{self.no_video_reason}; leave it unset")
        if options.max_pixels is not None:
            raise InvalidParameterError(
                "max_pixels", "does not apply to video frames, whose size is frame_size; leave it unset"
            )
        if options.beside_others:
            raise InvalidParameterError("beside_others", "does not apply to video frames; leave it unset")
        if not self.video.is_frame_size(width, height):
            units = " and ".join(map(str, dict.fromkeys(self.video.unit)))
            raise InvalidParameterError(
                "frame_size",
                f"must be multiples of {units} with at most {self.video.most_rows} rows, not {width} × {height}",
            )


def processor_backend(processor: Any) -> str:
    """Returns the library with which an image processor computes, "pil" or "torchvision"."""
    # Processors of transformers 4 that are left do not say it.
    return str(getattr(processor, "backend", "pil"))


def _no_max_pixels(data: Family) -> str:
    return f"{data.title} does not support this option, because it resizes to fixed sizes; leave it unset"


def _mask_of(data: Family, config: Any) -> Mask:
    """Returns the mask of a folder of this family."""
    return Mask.CAUSAL if data.is_causal(config) else data.mask


def _video(source: FamilySource, data: Family) -> tuple[VideoModel | None, str]:
    """Returns the folder's video rules, or None and the reason. Images are served in either case."""
    if data.video is None:
        return None, f"{data.title} takes no videos"
    try:
        model = _video_model(source, data.video)
    except CONFIGURATION_FAULTS as error:
        return None, f"the folder's video processor does not fit {data.title}: {in_one_line(error)}"
    return model, "" if model else "the folder's files name no video token"


def _video_model(source: FamilySource, rule: PairRule | FrameRule) -> VideoModel | None:
    return SingleFrames.load(source, rule) if isinstance(rule, FrameRule) else FramePairs.load(source, rule)


def _config(folder: ModelFolder) -> Any:
    try:
        return transformers.AutoConfig.from_pretrained(folder.path, trust_remote_code=False, local_files_only=True)
    except (OSError, ImportError, StrictDataclassError, *CONFIGURATION_FAULTS) as error:
        raise ModelFolderError(
            f"transformers cannot read {folder.path}/config.json: {refusal_text(folder.config, error)}"
        ) from error


def _check_packages(folder: ModelFolder, data: Family) -> None:
    """Raises ModelFolderError if a package is missing without which transformers cannot read the folder."""
    has_torchvision = transformers.utils.is_torchvision_available()
    if data.needs_timm and not (has_torchvision and transformers.utils.is_timm_available()):
        raise ModelFolderError(f"{folder.path}: {_NO_TIMM}")
    if data.needs_torchvision and not has_torchvision:
        raise ModelFolderError(f"{folder.path}: {_NO_TORCHVISION}")


def _image_processor(folder: ModelFolder, data: Family) -> Any:
    backend = "torchvision" if data.needs_torchvision else "pil"
    try:
        processor = transformers.AutoImageProcessor.from_pretrained(
            folder.path, backend=backend, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ImportError, *CONFIGURATION_FAULTS) as error:
        raise ModelFolderError(
            f"{folder.path} has no usable image processor: {in_one_line(error)}; download "
            f"{processor_file(folder.path)} again"
        ) from error
    if processor_backend(processor) != backend:
        raise ModelFolderError(f"{folder.path}: {type(processor).__name__} does not work without torchvision")
    check_processor_numbers(
        folder.path / processor_file(folder.path),
        processor,
        most_patches=data.most_patches,
        has_pixels=hasattr(processor, "merge_size"),
    )
    return processor


def processor_file(path: pathlib.Path) -> str:
    """Returns the name of the file in a folder from which transformers reads the settings of the image processor."""
    whole = path / _PROCESSOR_FILE
    return _PROCESSOR_FILE if whole.is_file() and "image_processor" in read_json_object(whole) else _IMAGES_FILE


def _settings(folder: ModelFolder) -> Mapping[str, Any]:
    path = folder.path / _PROCESSOR_FILE
    settings = read_json_object(path) if path.is_file() else {}
    return {name: value for name, value in settings.items() if name not in _NESTED}


def _video_settings(folder: ModelFolder) -> Mapping[str, Any]:
    """Returns the video processor's settings from the file that transformers would read.

    Old folders have one file for images and videos.
    """
    for name, entry in (
        (_PROCESSOR_FILE, "video_processor"),
        ("video_preprocessor_config.json", None),
        (_IMAGES_FILE, None),
    ):
        path = folder.path / name
        found = read_json_object(path) if path.is_file() else {}
        found = found.get(entry, {}) if entry else found
        if found:
            return dict(found)
    return {}


def _tokens(folder: ModelFolder) -> Mapping[str, str]:
    path = folder.path / "tokenizer_config.json"
    config = read_json_object(path) if path.is_file() else {}
    extra = config.get("extra_special_tokens")
    model_specific = config.get("model_specific_special_tokens")
    named: dict[str, Any] = {**config}
    for group in (extra, model_specific):
        if isinstance(group, dict):
            named.update(group)
    return {
        name: content
        for name, value in named.items()
        if name.endswith(_TOKEN_SUFFIX) and (content := _content(value)) is not None
    }


def _content(token: Any) -> str | None:
    """Returns the text of a token, which is stored as a string or as an object with a `content` string."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None
