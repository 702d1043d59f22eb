"""Builds a tiny PaliGemma folder: 16 rows per image, Gemma 1 text, no chat template."""

from __future__ import annotations

import pathlib
import warnings
from typing import Any

import torch
import transformers
from transformers.models.paligemma.processing_paligemma import EXTRA_TOKENS
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from tests import tiny_models
from tests.tiny_families import parts

NAME = "paligemma"
ROWS_PER_IMAGE = 16


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Writes the model's folder and returns its path."""
    tokenizer = prefix_tokenizer()
    text = transformers.GemmaConfig(
        **parts.gemma_text_config(tokenizer) | {"num_key_value_heads": 1, "hidden_act": "gelu_pytorch_tanh"}
    )
    return build_with(folder, tokenizer, text, seed)


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole processor on the PIL backend."""
    return parts.load(folder, _QuietPaliGemmaProcessor)


class _QuietPaliGemmaProcessor(transformers.PaliGemmaProcessor):  # type: ignore[misc]
    """PaliGemma's processor without NumPy's warning about how it copies tensors into labels."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the class above, with that warning suppressed."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="__array__ implementation", category=DeprecationWarning)
            return super().__call__(*args, **kwargs)


def prefix_tokenizer() -> Any:
    """Writes BOS before every text, as published ones do; PaliGemma's processor puts it behind the images instead."""
    named = {"image_token": "<image>"}
    tokenizer = parts.named_tokenizer(
        ["<pad>", "<eos>", "<bos>", "<image>"],
        named,
        bos="<bos>",
        eos="<eos>",
        pad="<pad>",
        template=None,
        adds_bos=True,
    )
    parts.add_gemma_whitespace(tokenizer)
    # Places and segments, which the processor adds if they are missing.
    tokenizer.add_tokens(EXTRA_TOKENS)
    return tokenizer


def build_with(folder: pathlib.Path, tokenizer: Any, text_config: Any, seed: int) -> pathlib.Path:
    """Writes the folder of a PaliGemma with a Gemma of any generation."""
    config = transformers.PaliGemmaConfig(
        text_config=text_config,
        vision_config=parts.siglip_config(image_size=56, patch_size=14),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        projection_dim=tiny_models.HIDDEN_SIZE,
        hidden_size=tiny_models.HIDDEN_SIZE,
        tie_word_embeddings=False,
    )
    model = parts.random_model(transformers.PaliGemmaForConditionalGeneration, config, tokenizer, seed)
    parts.centre_gemma(model.model.language_model)
    with torch.no_grad():
        # There are more place tokens than words, but answers should be words.
        model.lm_head.weight[tokenizer.convert_tokens_to_ids(EXTRA_TOKENS)] = 0.0
    images = SiglipImageProcessorPil(size={"height": 56, "width": 56}, image_seq_length=ROWS_PER_IMAGE)
    return tiny_models._save(folder, model, tokenizer, images, {"processor_class": "PaliGemmaProcessor"})
