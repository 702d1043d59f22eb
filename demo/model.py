"""Builds the untrained demo model and its processor: SigLIP vision tower, projector, Llama language model.

It uses only classes of `transformers`, so the trained folder loads without any code of this repository.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    SiglipVisionConfig,
)
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from demo.tokenizer import IMAGE, NUM_POSITIONS

IMAGE_SIDE_PX: Final = 96
PATCH_SIDE_PX: Final = 16
GRID_SIDE: Final = IMAGE_SIDE_PX // PATCH_SIDE_PX
NUM_ROWS: Final = GRID_SIDE * GRID_SIDE
"""Number of embedding rows, and so of placeholder tokens, of one picture."""
HIDDEN_SIZE: Final = 128
MAX_NEW_TOKENS: Final = 192
"""Most tokens of an answer: a list of three shapes as JSON takes up to 140."""

_ROPE_THETA: Final = 1e6
"""Base of the rotary positions. With the usual 10 000, half of the channels rotate too fast to compare a word with a
row a hundred tokens away."""
_MATCHING_GAIN: Final = 0.4

# All rows of the last hidden state: SigLIP has no class token to drop.
_FEATURE_LAYER: Final = -1
_FEATURE_STRATEGY: Final = "full"


def build_processor(tokenizer: PreTrainedTokenizerFast) -> LlavaProcessor:
    """Returns the processor that turns a chat and its pictures into token ids and pixel values [n, 3, 96, 96]."""
    side = {"height": IMAGE_SIDE_PX, "width": IMAGE_SIDE_PX}
    return LlavaProcessor(
        image_processor=SiglipImageProcessorPil(size=side, image_mean=[0.5] * 3, image_std=[0.5] * 3),
        tokenizer=tokenizer,
        patch_size=PATCH_SIDE_PX,
        vision_feature_select_strategy=_FEATURE_STRATEGY,
        num_additional_image_tokens=0,
        chat_template=tokenizer.chat_template,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlavaForConditionalGeneration:
    """Returns a newly initialised float32 model of about 1.6 million parameters."""
    torch.manual_seed(seed)
    vision = SiglipVisionConfig(
        hidden_size=HIDDEN_SIZE,
        intermediate_size=3 * HIDDEN_SIZE,
        num_hidden_layers=4,
        num_attention_heads=8,
        image_size=IMAGE_SIDE_PX,
        patch_size=PATCH_SIDE_PX,
        vision_use_head=False,
    )
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN_SIZE,
        intermediate_size=320,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=NUM_POSITIONS,
        tie_word_embeddings=True,
        initializer_range=0.05,
        rope_parameters={"rope_type": "default", "rope_theta": _ROPE_THETA},
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
        image_seq_length=NUM_ROWS,
        vision_feature_layer=_FEATURE_LAYER,
        vision_feature_select_strategy=_FEATURE_STRATEGY,
        tie_word_embeddings=True,
    )
    model = LlavaForConditionalGeneration(config)
    with torch.no_grad():
        model.model.vision_tower.embeddings.position_embedding.weight.copy_(_initial_positions())
    start_out_matching(model.model.language_model)
    model.generation_config.update(
        do_sample=False,
        max_new_tokens=MAX_NEW_TOKENS,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return model


def start_out_matching(language_model: nn.Module) -> None:
    """Sets equal query and key projections in every attention head, so that like attends to like from the first step.

    The word "circle" has to attend to the rows that mean circle. With random projections no run of thousands of steps
    learned this; with these it took hundreds (docs/log.md). Source: Trockman and Kolter, "Mimetic Initialization of
    Self-Attention Layers" (2023), who found the same for image classifiers on little data.
    """
    with torch.no_grad():
        for layer in language_model.layers:
            queries, keys = layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight
            nn.init.orthogonal_(keys, gain=math.sqrt(_MATCHING_GAIN))
            by_head = keys.view(-1, layer.self_attn.head_dim, HIDDEN_SIZE)
            num_sharing = queries.shape[0] // keys.shape[0]
            queries.copy_(by_head.repeat_interleave(num_sharing, dim=0).reshape_as(queries))


def _initial_positions() -> torch.Tensor:
    """Returns sines and cosines over both axes as the initial position embeddings [36, hidden_size].

    With random embeddings the tower needs several times as many steps to learn positions (measured 2026-11-20: accuracy
    of the grid cell after 300 steps 39 % with random ones, 99 % with these).
    """
    num_waves = HIDDEN_SIZE // 4
    angular = math.pi * 2.0 ** -torch.linspace(0.0, 4.0, num_waves)
    row, column = torch.meshgrid(torch.arange(GRID_SIDE), torch.arange(GRID_SIDE), indexing="ij")
    phases = [axis.flatten()[:, None] * angular for axis in (column, row)]
    return 0.5 * torch.cat([wave(phase) for phase in phases for wave in (torch.sin, torch.cos)], dim=1)
