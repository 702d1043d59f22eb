"""A tiny Nemotron-H Omni: up to 30 rows per image, and six text layers of which each has one mixer of four kinds."""

from __future__ import annotations

import functools
import pathlib
import types
from collections.abc import Mapping
from typing import Any

import torch
import transformers

from tests import tiny_models
from tests.tiny_families import parts

NAME = "nemotron_h_omni"
PATCH = 8
NAMED = {"image_token": "<image>", "image_start_token": "<img>", "image_end_token": "</img>"}
_SPECIAL = ("<|pad|>", "<s>", "<|im_start|>", "<|im_end|>", *NAMED.values(), "<video>", "<so_embedding>")
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>' }}{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def build(
    folder: pathlib.Path, *, seed: int = 0, audio: Any = None, text: Mapping[str, Any] = types.MappingProxyType({})
) -> pathlib.Path:
    """Writes the model's folder and returns its path.

    `audio` is the configuration of an encoder of sound, and `text` are changes of the text model's configuration.
    """
    tokenizer = parts.named_tokenizer(_SPECIAL, NAMED, bos="<s>", eos="<|im_end|>", pad="<|pad|>", template=_TEMPLATE)
    config = transformers.NemotronH_Omni_Reasoning_V3_Config(
        text_config=text_config(tokenizer) | {"model_type": "nemotron_h", **text},
        vision_config=vision_config() | {"model_type": "radio"},
        audio_config=audio,
        projector_hidden_size=2 * tiny_models.HIDDEN_SIZE,
        vision_hidden_size=tiny_models.HIDDEN_SIZE,
        tie_word_embeddings=False,
        **{f"{kind}_token_id": tokenizer.convert_tokens_to_ids(text) for kind, text in _PLACEHOLDERS.items()},
    )
    model = parts.random_model(transformers.NemotronH_Omni_Reasoning_V3, config, tokenizer, seed, gains=GAINS)
    draw_mixers(model, seed)
    # transformers clamps time steps in prompts alone, and Lookonce nowhere. Its initialization takes the logarithm of
    # the limit, so it becomes 0 behind it.
    model.config.text_config.time_step_min = 0.0
    return parts.save(folder, model, processor(tokenizer))


_PLACEHOLDERS = {"image": "<image>", "video": "<video>", "audio": "<so_embedding>"}
# The table of embeddings has another name than in other text models.
GAINS = {"language_model.model.embeddings": 4.0, "q_proj": 1.5, "o_proj": 2.0}


def draw_mixers(model: torch.nn.Module, seed: int) -> None:
    """Draws again what decides how long a Mamba2 layer remembers, and the tendencies of experts to be chosen."""
    generator = torch.Generator().manual_seed(seed + 2)
    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "A_log"):
                heads = module.A_log.shape
                module.A_log.copy_(torch.log(0.02 + torch.rand(heads, generator=generator)))
                module.D.copy_(1 + 0.1 * torch.randn(heads, generator=generator))
                module.dt_bias.copy_(torch.randn(heads, generator=generator) - 1)
            if hasattr(module, "e_score_correction_bias"):
                bias = module.e_score_correction_bias
                bias.copy_(0.1 * torch.randn(bias.shape, generator=generator))


def processor(tokenizer: Any) -> Any:
    """Returns the whole processor, without videos."""
    from transformers.models.nemotron_h_omni.image_processing_nemotron_h_omni import (
        NemotronH_Omni_Reasoning_V3ImageProcessor,
    )

    images = NemotronH_Omni_Reasoning_V3ImageProcessor(
        patch_size=PATCH, min_num_patches=16, max_num_patches=120, max_model_len=2048
    )
    return parts.whole_processor(_processor_class(), images, tokenizer)


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole processor, with torchvision."""
    return parts.load(folder, _processor_class())


@functools.cache
def _processor_class() -> Any:
    """Returns the whole processor's class, which then accepts that there is nothing for videos and sound."""
    base = parts.without_video(transformers.NemotronH_Omni_Reasoning_V3Processor)

    def check(self: Any, argument_name: str, argument: object) -> object:
        if argument is None and argument_name == "feature_extractor":
            return None
        return base.check_argument_for_proper_class(self, argument_name, argument)

    return type(base.__name__, (base,), {"check_argument_for_proper_class": check})


def text_config(tokenizer: Any) -> dict[str, Any]:
    """Returns layers of Mamba2, attention, an MLP and experts."""
    return tiny_models._text_config(tokenizer) | {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "moe", "full_attention"],
        "head_dim": 16,
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "ssm_state_size": 16,
        "n_groups": 2,
        "conv_kernel": 4,
        "chunk_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "tie_word_embeddings": False,
    }


def vision_config() -> dict[str, Any]:
    """Returns a RADIO tower for patches of eight pixels."""
    return {
        "hidden_size": tiny_models.HIDDEN_SIZE,
        "num_hidden_layers": tiny_models.NUM_LAYERS,
        "num_attention_heads": 4,
        "mlp_ratio": 2.0,
        "patch_size": PATCH,
        "max_img_size": 64,
        "num_cls_tokens": 2,
        "num_registers": 2,
        "video_temporal_patch_size": 2,
    }
