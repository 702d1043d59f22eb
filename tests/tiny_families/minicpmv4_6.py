"""A tiny MiniCPM-V 4.6: the whole image and up to 4 slices of about 4 rows each, numbered images, Qwen3.5's text."""

from __future__ import annotations

import functools
import pathlib
import types
from collections.abc import Mapping
from typing import Any

import transformers
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil

from tests import tiny_models
from tests.tiny_families import parts, qwen3_5

NAME = "minicpmv4_6"
_PATCH = 8
# Side of the square whose pixels a slice has: two by two rows of four by four patches.
_SLICE = 64

_NAMED = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "image_start_token": "<image>",
    "image_end_token": "</image>",
    "slice_start_token": "<slice>",
    "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>",
    "image_id_end_token": "</image_id>",
}
# No markers around an image: the processor writes them.
_TEMPLATE = tiny_models.QWEN_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<|image_pad|>").replace(
    "<|vision_start|><|video_pad|><|vision_end|>", "<|video_pad|>"
)


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Writes the model's folder and returns its path."""
    return build_as("MiniCPMV4_6", folder, seed)


def build_as(
    name: str, folder: pathlib.Path, seed: int, markers: Mapping[str, str] = types.MappingProxyType({})
) -> pathlib.Path:
    """Writes a folder of MiniCPM-V 4.6 or 4.7, by the start of the names of its classes.

    `markers` are fields of the configuration with ids of tokens, and the tokens.
    """
    tokenizer = parts.named_tokenizer(
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *_NAMED.values()],
        _NAMED,
        bos=None,
        eos="<|im_end|>",
        pad="<|endoftext|>",
        template=_TEMPLATE,
    )
    config = getattr(transformers, f"{name}Config")(
        text_config=qwen3_5.text_config(tokenizer) | {"model_type": "qwen3_5_text"},
        vision_config={
            "hidden_size": tiny_models.HIDDEN_SIZE,
            "intermediate_size": 2 * tiny_models.HIDDEN_SIZE,
            "num_hidden_layers": tiny_models.NUM_LAYERS,
            "num_attention_heads": 4,
            "image_size": 2 * _SLICE,
            "patch_size": _PATCH,
        },
        insert_layer_id=0,
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        tie_word_embeddings=False,
        **{field: one for field, token in markers.items() for one in tokenizer.encode(token)},
    )
    model = parts.random_model(
        getattr(transformers, f"{name}ForConditionalGeneration"),
        config,
        tokenizer,
        seed,
        ends=["<|endoftext|>"],
        gains=parts.ATTENTIVE_NORMED,
    )
    images = MiniCPMV4_6ImageProcessorPil(patch_size=_PATCH, scale_resolution=_SLICE, max_slice_nums=4)
    return tiny_models._save(folder, model, tokenizer, images, {"processor_class": f"{name}Processor"})


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole processor on the PIL backend."""
    return parts.load(folder, processor_class(transformers.MiniCPMV4_6Processor))


@functools.cache
def processor_class(whole: Any) -> Any:
    """Returns a processor class with a stand-in for the video processor, which needs torchvision.

    The original reads two settings of it when it is created.
    """
    original = parts.without_video(whole)
    settings = types.SimpleNamespace(slice_mode=True, downsample_mode="16x")

    def check(self: Any, argument_name: str, argument: object) -> object:
        if argument is settings:
            return None
        return original.check_argument_for_proper_class(self, argument_name, argument)

    # transformers reads the names of a processor's parts from this signature.
    def __init__(
        self: Any,
        image_processor: Any = None,
        video_processor: Any = None,
        tokenizer: Any = None,
        chat_template: Any = None,
        **arguments: Any,
    ) -> None:
        original.__init__(self, image_processor, settings, tokenizer, chat_template, **arguments)

    members = {"__init__": __init__, "check_argument_for_proper_class": check}
    return type(original.__name__, (original,), members)
