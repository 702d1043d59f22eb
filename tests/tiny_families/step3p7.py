"""A tiny Step 3.7: tiles with 4 rows each and the whole image with 9; layers with 4 or 6 query heads, bounded gates."""

from __future__ import annotations

import pathlib
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests import tiny_models
from tests.tiny_families import parts

NAME = "step3p7"
PATCH, TILE, WHOLE, MOST_PIXELS = 4, 32, 48, 96
NUM_LAYERS = 4
_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<im_patch>' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_SPECIAL = (
    *("<|pad|>", "<|begin|>", "<|im_start|>", "<|im_end|>", "<im_patch>", "<im_start>", "<im_end>"),
    *("<patch_start>", "<patch_end>", "<patch_newline>"),
)


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Builds a model of four text layers, the first one dense, and a fifth one that predicts further tokens.

    The second and third have a window and six query heads. Some experts are bounded, and some layers beside them.
    """
    return build_with(folder, seed, {})


def build_with(folder: pathlib.Path, seed: int, text: dict[str, Any]) -> pathlib.Path:
    """The same with other fields of the text model."""
    from transformers.models.step3p7.image_processing_step3p7 import Step3p7ImageProcessor

    tokenizer = parts.named_tokenizer(
        _SPECIAL, {}, bos="<|begin|>", eos="<|im_end|>", pad="<|pad|>", template=_TEMPLATE
    )
    config = transformers.Step3p7Config(
        text_config=_text_config(tokenizer) | text,
        vision_config={
            "hidden_size": tiny_models.HIDDEN_SIZE // 2,
            "num_hidden_layers": tiny_models.NUM_LAYERS,
            "num_attention_heads": 4,
            "image_size": WHOLE,
            "patch_size": PATCH,
            "mlp_ratio": 2.0,
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<im_patch>"),
        tie_word_embeddings=False,
    )
    gains = {"embed_tokens": 0.5, "g_proj": 2.0, "multi_modal_projector": 2.0}
    model = parts.random_model(transformers.Step3p7ForConditionalGeneration, config, tokenizer, seed, gains=gains)
    _redraw(model, seed)
    images = Step3p7ImageProcessor(
        size={"height": WHOLE, "width": WHOLE}, patch_size=TILE, max_image_size=MOST_PIXELS, vision_patch_size=PATCH
    )
    parts.save(folder, model, parts.whole_processor(transformers.Step3p7Processor, images, tokenizer))
    _add_predicting_layer(folder, config.text_config.num_hidden_layers)
    return folder


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole processor, with torchvision."""
    return parts.load(folder, transformers.Step3p7Processor)


def _text_config(tokenizer: Any) -> dict[str, Any]:
    return tiny_models._text_config(tokenizer) | {
        "num_hidden_layers": NUM_LAYERS,
        "head_dim": 16,
        "num_sliding_attention_heads": 6,
        "sliding_window": 12,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "share_expert_dim": 48,
        "moe_router_scaling_factor": 1.5,
        "query_pre_attn_scalar": 20,
        # Without a bound, the kernel computes the experts.
        "swiglu_limits": [None, 0.4, 0.0, 0.3],
        "swiglu_limits_shared": [0.5, None, 0.3, 0.0],
        "num_nextn_predict_layers": 1,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "llama3",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 0.5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 1_000.0},
        },
    }


def _redraw(model: Any, seed: int) -> None:
    """Draws norms that multiply by 1 + weight, the scales of the tower's layers, and biases of the experts' scores."""
    generator = torch.Generator().manual_seed(seed + 2)
    with torch.no_grad():
        for name, parameter in model.model.named_parameters():
            if name.startswith("language_model.") and name.endswith("norm.weight"):
                # Those of queries and keys stay above 1, so that attention is not nearly uniform.
                parameter.sub_(0.3 if name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0)
            elif "lambda_" in name:
                parameter.add_(0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))


def _add_predicting_layer(folder: pathlib.Path, num_layers: int) -> None:
    """Adds the tensors of a layer behind the last one, which published files have and nobody loads."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    last = f"model.layers.{num_layers - 1}."
    more = {
        name.replace(last, f"model.layers.{num_layers}."): tensor.clone()
        for name, tensor in tensors.items()
        if last in name
    }
    assert more
    save_file({**more, **tensors}, file, metadata={"format": "pt"})
