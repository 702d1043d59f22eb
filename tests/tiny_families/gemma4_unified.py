"""Builds a tiny Gemma 4 Unified folder: squares of 12 px, each of which is projected to a row, and no tower.

The rows of an image see each other in layers with a window. Heads of layers without one are twice as large, and their
keys are their values. The folder has an embedder of sound, which is not used.
"""

from __future__ import annotations

import pathlib
from typing import Any

import torch
import transformers

from tests import tiny_models
from tests.tiny_families import gemma4, parts

NAME = "gemma4_unified"
MAX_ROWS = 70


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Writes the model's folder and returns its path."""
    from transformers.models.gemma4_unified.image_processing_gemma4_unified import Gemma4UnifiedImageProcessor

    tokenizer = gemma4.trained_tokenizer()
    config = transformers.Gemma4UnifiedConfig(
        text_config=transformers.Gemma4UnifiedTextConfig(
            **gemma4.text_fields(tokenizer),
            use_bidirectional_attention="vision",
            attention_k_eq_v=True,
            num_global_key_value_heads=1,
        ),
        vision_config=transformers.Gemma4UnifiedVisionConfig(
            patch_size=gemma4.PATCH_SIZE,
            mm_embed_dim=tiny_models.HIDDEN_SIZE,
            output_proj_dims=tiny_models.HIDDEN_SIZE,
            mm_posemb_size=MAX_ROWS,
        ),
        audio_config=transformers.Gemma4UnifiedAudioConfig(audio_embed_dim=32),
        tie_word_embeddings=False,
        **gemma4.token_ids(tokenizer),
    )
    model = parts.random_model(
        transformers.Gemma4UnifiedForConditionalGeneration, config, tokenizer, seed, ends=["<turn|>"]
    )
    _finish(model.model.embed_vision, seed)
    gemma4.finish(model, seed)
    # Without it, `generate` of transformers 5.23 lets the rows of an image see each other in all layers, and beyond the
    # window: see lookonce/families/gemma4_unified.py.
    model.generation_config.cache_implementation = "static"
    images = Gemma4UnifiedImageProcessor(patch_size=gemma4.PATCH_SIZE, max_soft_tokens=MAX_ROWS)
    return tiny_models._save(folder, model, tokenizer, images, {"processor_class": "Gemma4UnifiedProcessor"})


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the processor, without sound and videos."""
    images = transformers.AutoImageProcessor.from_pretrained(folder, backend="torchvision")
    return gemma4.processor_of(folder, images, transformers.Gemma4UnifiedProcessor)


def _finish(embedder: Any, seed: int) -> None:
    """Draws the norms of the embedder."""
    generator = torch.Generator().manual_seed(seed + 3)
    with torch.no_grad():
        for name, tensor in embedder.named_parameters():
            if name.endswith(("ln1.weight", "ln2.weight", "norm.weight")):
                tensor.copy_(1.0 + 0.1 * torch.randn(tensor.shape, generator=generator))
