"""Checks a model folder for `lookonce doctor`: whether both services can load it, and how many rows images take.

Needs torch and transformers. Reads the vision half's weights for the fingerprint, and only the headers of the others.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from transformers.utils import logging as transformers_logging

from lookonce.content_key import ProcessorOptions
from lookonce.embedding_meta import RowDtype
from lookonce.errors import ImageTooLargeError, LookonceError, ModelFolderError
from lookonce.families.base import ImageShape, Mask
from lookonce.families.video import DEFAULT_FPS, video_token
from lookonce.local.finding import Finding
from lookonce.local.half_check import HalfWeights, check_half
from lookonce.model.family_model import FamilyModel, processor_file
from lookonce.model.faults.build_faults import in_one_line
from lookonce.model.generation_config import ignored_fields, read_generation_config
from lookonce.model.generation_defaults import parse_defaults
from lookonce.model.half_model import Half, load_vision_half
from lookonce.model.model_folder import (
    CONFIGURATION_FAULTS,
    ModelFolder,
    chat_template_source,
    image_token_field,
    image_token_id,
)
from lookonce.model.pretrained_tokenizer import NO_BOS, load_pretrained
from lookonce.model.template_errors import TEMPLATE_ERRORS
from lookonce.model.text_support import (
    RecurrentKind,
    head_shape,
    key_sources,
    layers_without_keys,
    recurrent_kinds,
)
from lookonce.model.vision_fingerprint import dtype_name, vision_fingerprint

_SAMPLE_SIZES = ((640, 480), (1920, 1080), (3000, 200))
_SAMPLE_FRAMES = (16, 128)
# The decoder's default number of tokens per KV block.
_BLOCK_TOKENS = 16
_MANY_TOKENS = 1024
# The settings of the decoder that decide whether an image fits into a step, and their defaults.
_STEP_TOKENS, _STEP_REQUESTS = ("LOOKONCE_MAX_NUM_BATCHED_TOKENS", 2048), ("LOOKONCE_MAX_NUM_SEQS", 64)
_TOKEN_ADVICE = "use the config.json that belongs to the tokenizer, and its chat template"
_NO_TEMPLATE = (
    "none: the decoder starts, but refuses chats, and with them `lookonce generate` without --raw; put the model's "
    "chat_template.jinja into the folder, or use text and token prompts only"
)


def examine_folder(folder: ModelFolder) -> list[Finding]:
    """Returns the findings about an opened folder.

    For each one that is not fine a service would refuse to start, or, without a chat template, refuse all chats.
    """
    with _quiet_transformers():
        try:
            model = FamilyModel.load(folder)
        except LookonceError as error:
            return [Finding("family", False, str(error))]
        try:
            generation = read_generation_config(folder.path)
        except LookonceError as error:
            # transformers reads the file with the weights and fails, so nothing else can be examined.
            return [Finding("generation defaults", False, str(error))]
        findings = [
            Finding("family", True, model.data.title),
            *_examined("vision half", lambda: _vision(folder, model)),
            *_examined("text half", lambda: _text(folder, model)),
            *_examined("rows of images", lambda: _sample_rows(model), processor_file(folder.path)),
            *_examined("tokenizer", lambda: _texts(folder, model)),
            *_defaults(folder, generation),
        ]
    if all(finding.is_fine for finding in findings):
        findings.append(Finding("loading", True, "encoder and decoder can load this folder"))
    return findings


def _examined(name: str, examine: Callable[[], list[Finding]], file: str = "config.json") -> list[Finding]:
    """Returns the findings of a part of the folder, or one about a file with which nothing can be computed."""
    try:
        return examine()
    except LookonceError as error:
        return [Finding(name, False, str(error))]
    except CONFIGURATION_FAULTS as error:
        reason = f"cannot be computed with the numbers in {file}: {in_one_line(error)}; download {file} again"
        return [Finding(name, False, reason)]


def _sample_rows(model: FamilyModel) -> list[Finding]:
    return [Finding("rows of images", True, ", ".join(_rows(model, *size) for size in _SAMPLE_SIZES))]


def _defaults(folder: ModelFolder, generation: Mapping[str, Any]) -> list[Finding]:
    """Returns what the decoder refuses or ignores of the sampling defaults; nothing if it takes all of them."""
    try:
        parse_defaults(generation, folder.config, None)
    except LookonceError as error:
        return [Finding("generation defaults", False, str(error))]
    ignored = ignored_fields(generation)
    return [Finding("generation defaults", True, f"ignored: {', '.join(ignored)}")] if ignored else []


def _vision(folder: ModelFolder, model: FamilyModel) -> list[Finding]:
    """Returns findings about the encoder: weights, fingerprint and rows."""
    try:
        weights = check_half(folder, model.source.config, Half.VISION)
        half = load_vision_half(folder.path, None)
        row_dtype = RowDtype(dtype_name(half))
        fingerprint = vision_fingerprint(folder, half, model, row_dtype)
    except (LookonceError, RuntimeError, ValueError, OSError) as error:
        return [Finding("vision half", False, str(error))]
    width = (1 + model.num_levels) * int(model.source.config.get_text_config().hidden_size)
    row_bytes = width * weights.dtype.itemsize
    level_bytes = row_bytes - row_bytes // (1 + model.num_levels)
    levels = f", {level_bytes:,} of them feature levels" if level_bytes else ""
    most = model.sizing.largest.num_rows
    return [
        Finding("vision half", True, _described(weights)),
        Finding("encoder fingerprint", True, str(fingerprint)),
        Finding("row", True, f"{row_bytes:,} bytes{levels}; {_size(row_bytes * most)} for the largest image"),
    ]


def _text(folder: ModelFolder, model: FamilyModel) -> list[Finding]:
    """Returns findings about the decoder: weights and KV cache."""
    try:
        weights = check_half(folder, model.source.config, Half.TEXT)
    except LookonceError as error:
        return [Finding("text half", False, str(error))]
    text = model.source.config.get_text_config()
    recurrent = list(recurrent_kinds(text).values())
    shapes = [head_shape(text, layer) for layer in _layers_with_keys(text)]
    token_bytes = sum(shape.num_elements for shape in shapes) * weights.dtype.itemsize
    block = f"{token_bytes * _BLOCK_TOKENS:,} bytes per block of {_BLOCK_TOKENS} tokens"
    many = f"{_size(token_bytes * _MANY_TOKENS)} per {_MANY_TOKENS:,} tokens"
    others = ""
    if recurrent:
        state_bytes = sum(_state_bytes(text, kind, weights.dtype.itemsize) for kind in recurrent)
        others = f", and {_size(state_bytes)} per request and per snapshot of {len(recurrent)} recurrent layers"
    cache = Finding("KV cache", True, f"{block}, {many}{others}")
    return [Finding("text half", True, _described(weights)), cache]


def _layers_with_keys(text: Any) -> list[int]:
    """Returns the layers that have keys and values of their own."""
    others = layers_without_keys(text) | key_sources(text).keys()
    return [layer for layer in range(text.num_hidden_layers) if layer not in others]


def _state_bytes(text: Any, kind: RecurrentKind, element_bytes: int) -> int:
    """Returns the bytes of a recurrent layer's state: a float32 matrix per head, and the convolution's last inputs.

    A layer that is a short convolution has no matrix.
    """
    if kind is RecurrentKind.SHORT_CONVOLUTION:
        return int(text.hidden_size * (text.conv_L_cache - 1) * element_bytes)
    if kind is RecurrentKind.MAMBA2:
        width = text.mamba_num_heads * text.mamba_head_dim
        channels = width + 2 * text.n_groups * text.ssm_state_size
        return int(width * text.ssm_state_size * 4 + channels * (text.conv_kernel - 1) * element_bytes)
    keys = text.linear_num_key_heads * text.linear_key_head_dim
    values = text.linear_num_value_heads * text.linear_value_head_dim
    window_bytes = (2 * keys + values) * (text.linear_conv_kernel_dim - 1) * element_bytes
    return int(values * text.linear_key_head_dim * 4 + window_bytes)


def _described(weights: HalfWeights) -> str:
    dtype = str(weights.dtype).removeprefix("torch.")
    layers = "".join(f"; {number} linear layers as {form}" for form, number in weights.quantized.items())
    return f"{_size(weights.num_bytes)} as {dtype} in {weights.num_tensors} tensors{layers}"


def _rows(model: FamilyModel, width: int, height: int) -> str:
    try:
        rows = f"{model.image_shape(width, height, ProcessorOptions()).num_rows:,}"
    except ImageTooLargeError:
        rows = "refused for its aspect ratio"
    return f"{width}×{height}: {rows}"


def _texts(folder: ModelFolder, model: FamilyModel) -> list[Finding]:
    """Returns findings that need the tokenizer. Raises ModelFolderError if it has other markers than the family."""
    try:
        tokenizer = load_pretrained(folder.path)
    except LookonceError as error:
        return [Finding("tokenizer", False, str(error))]
    model.marker_ids(lambda text: tokenizer.encode(text, add_special_tokens=False))
    needs_bos = model.data.finish_text is not None and not tokenizer.bos_token
    without_bos = [Finding("tokenizer", False, NO_BOS)] if needs_bos else []
    return [*without_bos, *_largest_image(folder, model, tokenizer), *_prompts(folder, model, tokenizer)]


def _largest_image(folder: ModelFolder, model: FamilyModel, tokenizer: Any) -> list[Finding]:
    largest = model.sizing.largest
    try:
        num_tokens, span_tokens = _num_tokens(folder, tokenizer, largest)
    except LookonceError as error:
        return [Finding("largest image", False, str(error))]
    sizes = Finding("largest image", True, f"{largest.num_rows:,} rows, {num_tokens:,} tokens of the prompt")
    if model.mask is Mask.CAUSAL:
        return [sizes]
    most, num_requests = _setting(*_STEP_TOKENS), _setting(*_STEP_REQUESTS)
    needed = max(span_tokens, model.most_rows) + num_requests - 1
    detail = f"the decoder needs --max-num-batched-tokens {needed:,} or more, since an image is never split over steps"
    return [sizes, Finding("step", needed <= most, f"{detail}; it is {most:,}, with --max-num-seqs {num_requests:,}")]


def _setting(variable: str, default: int) -> int:
    """Returns a number that the decoder reads from the environment. A value that is none is refused when it starts."""
    stated = os.environ.get(variable, "")
    return int(stated) if stated.isdecimal() else default


def _prompts(folder: ModelFolder, model: FamilyModel, tokenizer: Any) -> list[Finding]:
    """Returns findings about the chat template's placeholders for images and videos."""
    try:
        source = chat_template_source(folder.path, tokenizer.chat_template)
    except LookonceError as error:
        return [Finding("chat template", False, str(error))]
    if model.data.finish_text is not None:
        # The family's processor puts images before the whole text, which no template can do.
        return [Finding("chat template", True, "not used: this family takes text and token prompts only")]
    if source is None:
        return [Finding("chat template", False, _NO_TEMPLATE), _videos(model, takes_videos=False)]
    own = model.data.placeholder(model.source)
    placeholder = own or tokenizer.convert_ids_to_tokens(_image_token_id(folder))
    field = image_token_field(folder.config)
    named = own or f"{placeholder}, which config.json names as the image token ({field}),"
    if (fault := _placement_fault(tokenizer, source, placeholder, named)) is not None:
        return [Finding("chat template", False, fault)]
    takes_videos = False
    if model.video is not None and (token := video_token(model.video, tokenizer)) is not None:
        with contextlib.suppress(*TEMPLATE_ERRORS):
            takes_videos = _num_written(tokenizer, source, "video", model.video.placeholder(token)) == 1
    return [Finding("chat template", True, f"writes {placeholder}"), _videos(model, takes_videos=takes_videos)]


def _placement_fault(tokenizer: Any, source: str, placeholder: str, named: str) -> str | None:
    """Says why the template cannot place images; None: it can. `named` says where the placeholder comes from."""
    try:
        num_written = _num_written(tokenizer, source, "image", placeholder)
        num_without = _num_written(tokenizer, source, "text", placeholder)
    except TEMPLATE_ERRORS as error:
        return f"cannot be rendered: {error}"
    if num_written != 1:
        return f"writes {num_written} × {named} for one image; it must be one; {_TOKEN_ADVICE}"
    if num_without:
        return f"writes {named} without an image; {_TOKEN_ADVICE}"
    return None


def _num_written(tokenizer: Any, source: str, part_type: str, text: str) -> int:
    """Counts `text` in the rendered template of one part of type `part_type`. Raises one of TEMPLATE_ERRORS."""
    first = {"type": "text", "text": "!"} if part_type == "text" else {"type": part_type}
    conversation = [{"role": "user", "content": [first, {"type": "text", "text": "?"}]}]
    rendered = tokenizer.apply_chat_template(
        conversation, chat_template=source, add_generation_prompt=True, tokenize=False
    )
    return str(rendered).count(text)


def _videos(model: FamilyModel, *, takes_videos: bool) -> Finding:
    if model.video is None:
        return Finding("videos", True, f"not taken: {model.no_video_reason}")
    if not takes_videos:
        return Finding("videos", True, "not taken: the chat template does not write them")
    width, height = _SAMPLE_SIZES[0]
    rows = []
    for num_frames in _SAMPLE_FRAMES:
        frame_size = model.frame_size(width, height, num_frames, None)
        shapes = model.video.shapes(frame_size, num_frames, DEFAULT_FPS)
        rows.append(f"{num_frames} frames of {width}×{height}: {sum(shape.num_rows for shape in shapes):,} rows")
    return Finding("videos", True, ", ".join(rows))


def _num_tokens(folder: ModelFolder, tokenizer: Any, shape: ImageShape) -> tuple[int, int]:
    """Returns the number of prompt tokens of one image, and that from the first one with a row to the last.

    Raises ModelFolderError if the tokenizer does not fit.
    """
    token_id = _image_token_id(folder)
    token = tokenizer.convert_ids_to_tokens(token_id)
    if token is None:
        raise ModelFolderError(f"the tokenizer has no token with the image token's id {token_id}")
    text = shape.text(token)
    ids = [token_id] if text == token else tokenizer.encode(text, add_special_tokens=False)
    runs = [part for part in shape.parts if isinstance(part, int)]
    if ids.count(token_id) != len(runs):
        raise ModelFolderError(
            f"the tokenizer does not fit the family: {text!r} has {ids.count(token_id)} image tokens, not {len(runs)}; "
            "use the tokenizer that belongs to the weights"
        )
    places = [place for place, found in enumerate(ids) if found == token_id]
    more = sum(runs) - len(runs)
    return len(ids) + more, places[-1] - places[0] + 1 + more


def _image_token_id(folder: ModelFolder) -> int:
    token_id = image_token_id(folder.config)
    if not isinstance(token_id, int):
        raise ModelFolderError("config.json has no image token (image_token_index or image_token_id)")
    return token_id


def _size(num_bytes: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes / 1e3:.1f} kB"


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Silences transformers' progress bars and reports inside the block, since findings report the faults."""
    verbosity, has_bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if has_bars:
            transformers_logging.enable_progress_bar()
