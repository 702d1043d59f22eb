"""Builds a tiny SmolVLM folder: Idefics3's tiles under SmolVLM's own classes and tokens."""

from __future__ import annotations

import json
import pathlib
import types
from typing import Any
from unittest import mock

import transformers
from transformers.models.smolvlm import processing_smolvlm
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from tests import tiny_models
from tests.tiny_families import idefics3, parts

NAME = "smolvlm"


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Writes the model's folder and returns its path."""
    named = {
        "fake_image_token": "<fake_token_around_image>",
        "image_token": "<image>",
        "end_of_utterance_token": "<end_of_utterance>",
        "global_image_token": "<global-img>",
    }
    tokenizer = parts.named_tokenizer(
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *named.values(), *idefics3.TILE_NAMES],
        named,
        bos="<|im_start|>",
        eos="<end_of_utterance>",
        pad="<|im_end|>",
        template="<|im_start|>" + idefics3.MESSAGES,
    )
    config = transformers.SmolVLMConfig(**idefics3.split_config(tokenizer))
    model = parts.random_model(transformers.SmolVLMForConditionalGeneration, config, tokenizer, seed)
    images = SmolVLMImageProcessorPil(
        size={"longest_edge": 3 * idefics3.TILE}, max_image_size={"longest_edge": idefics3.TILE}
    )
    settings = {"processor_class": "SmolVLMProcessor", "image_seq_len": idefics3.ROWS_PER_TILE}
    return tiny_models._save(folder, model, tokenizer, images, settings)


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole processor on the PIL backend, for images only.

    It demands num2words and a video processor (which needs torchvision), although only videos use them. A plain `str`
    and an object with the two fields that every chat template call reads replace them.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    images = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    settings = json.loads((folder / "processor_config.json").read_text())
    settings.pop("processor_class")
    settings["video_processor"] = types.SimpleNamespace(num_frames=1, fps=1)
    with mock.patch.object(processing_smolvlm, "num2words", str):
        return parts.whole_processor(_ImagesOnlySmolVLMProcessor, images, tokenizer, settings)


class _ImagesOnlySmolVLMProcessor(transformers.SmolVLMProcessor):  # type: ignore[misc]
    """SmolVLM's processor without the check of its video processor."""

    def check_argument_for_proper_class(self, argument_name: str, argument: object) -> object:
        """Accepts any object as the video processor."""
        if argument_name == "video_processor":
            return None
        return super().check_argument_for_proper_class(argument_name, argument)
