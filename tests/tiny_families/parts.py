"""Parts that the tiny folders of several families share."""

from __future__ import annotations

import functools
import importlib
import json
import math
import pathlib
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
import torch
import transformers

from tests import tiny_models

_MODALITIES = ("image_processor", "video_processor")

# Gains that make an answer depend more on attention than on the last token of the prompt.
ATTENTIVE = {"embed_tokens": 0.5, "self_attn.q_proj": 1.5, "self_attn.o_proj.weight": 2.0}
# The same for models that norm queries and keys, where the scale of their projections has no effect.
ATTENTIVE_NORMED = {"embed_tokens": 0.5, "self_attn.q_norm": 2.0, "self_attn.k_norm": 2.0}


def random_model(
    model_class: Any,
    config: Any,
    tokenizer: Any,
    seed: int,
    *,
    ends: Sequence[str] = (),
    gains: Mapping[str, float] = types.MappingProxyType({}),
) -> Any:
    """Returns a model with random weights drawn as in `tiny_models`.

    `ends` are tokens that end an answer besides EOS. `gains` are factors on weights by a part of their name, to keep
    other inputs from drowning out the image.
    """
    model = tiny_models._random_model(model_class, config, tokenizer, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _redraw(name, parameter, generator)
            for part, gain in gains.items():
                if part in name:
                    parameter.mul_(gain)
    if ends:
        model.generation_config.eos_token_id = [
            tokenizer.eos_token_id,
            *(tokenizer.convert_tokens_to_ids(token) for token in ends),
        ]
    return model


def save(folder: pathlib.Path, model: Any, processor: Any) -> pathlib.Path:
    """Writes a folder in the form of published ones, with separate files for image processor and processor."""
    settings = {name: value for name, value in processor.to_dict().items() if name not in _MODALITIES}
    return tiny_models._save(folder, model, processor.tokenizer, processor.image_processor, settings)


def load(folder: pathlib.Path, processor_class: Any) -> Any:
    """Returns the whole processor of a folder that `save` wrote, on the PIL backend."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    images = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    settings = json.loads((folder / "processor_config.json").read_text())
    settings.pop("processor_class")
    return whole_processor(processor_class, images, tokenizer, settings)


def whole_processor(
    processor_class: Any, images: Any, tokenizer: Any, settings: Mapping[str, Any] = types.MappingProxyType({})
) -> Any:
    """Builds a processor from its parts; the chat template is the tokenizer's."""
    return processor_class(
        image_processor=images, tokenizer=tokenizer, chat_template=tokenizer.chat_template, **settings
    )


@functools.cache
def without_video(processor_class: Any) -> Any:
    """Returns a processor class of the same name that accepts a missing video processor, which needs torchvision."""

    def check(self: Any, argument_name: str, argument: object) -> object:
        if argument is None and argument_name == "video_processor":
            return None
        return processor_class.check_argument_for_proper_class(self, argument_name, argument)

    return type(processor_class.__name__, (processor_class,), {"check_argument_for_proper_class": check})


@functools.cache
def images_only(processor_class: Any) -> Any:
    """Returns a processor class without a video processor, which needs torchvision, and without one for audio."""

    def check(self: Any, argument_name: str, argument: object) -> object:
        if argument is None:
            return None
        return processor_class.check_argument_for_proper_class(self, argument_name, argument)

    return type(processor_class.__name__, (processor_class,), {"check_argument_for_proper_class": check})


def named_tokenizer(
    special: Sequence[str],
    named: Mapping[str, str],
    *,
    bos: str | None,
    eos: str,
    pad: str,
    template: str | None,
    adds_bos: bool = False,
) -> Any:
    """Trains a tokenizer as in `tiny_models`, with line breaks that merge.

    `named` are the special tokens that have a name (`boi_token`, …).
    """
    trained = tiny_models._tokenizer(list(special), bos=bos, eos=eos, pad=pad, template="", adds_bos=adds_bos)
    standard = {"eos_token": eos, "pad_token": pad} | ({"bos_token": bos} if bos else {})
    others = [token for token in special if token not in {*standard.values(), *named.values()}]
    # Remove unset tokens, so that the saved file has no entries for them.
    optional = {
        "extra_special_tokens": others,
        "model_specific_special_tokens": dict(named),
        "chat_template": template,
    }
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=_merging_line_breaks(trained.backend_tokenizer),
        clean_up_tokenization_spaces=False,
        **standard,
        **{name: value for name, value in optional.items() if value},
    )


def add_gemma_whitespace(tokenizer: Any) -> None:
    """Adds runs of line breaks as plain-text tokens, as in Gemma's tokenizers."""
    tokenizer.add_tokens(["\n" * length for length in range(1, 5)])


def _merging_line_breaks(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Returns the tokenizer with one token for two line breaks, as in published ones.

    The text around an image and the expansion of its placeholder may therefore share a token. `Ċ` is a line break among
    the byte-level letters.
    """
    state = json.loads(tokenizer.to_str())
    state["model"]["vocab"]["ĊĊ"] = tokenizer.get_vocab_size()
    state["model"]["merges"].append(["Ċ", "Ċ"])
    return tokenizers.Tokenizer.from_str(json.dumps(state))


def siglip_config(image_size: int, patch_size: int) -> Any:
    """Returns the configuration of a SigLIP tower without its pooling head."""
    return transformers.SiglipVisionConfig(
        hidden_size=tiny_models.HIDDEN_SIZE,
        intermediate_size=2 * tiny_models.HIDDEN_SIZE,
        num_hidden_layers=tiny_models.NUM_LAYERS,
        num_attention_heads=4,
        image_size=image_size,
        patch_size=patch_size,
        vision_use_head=False,
    )


def qwen3_text(tokenizer: Any) -> Any:
    """Returns the configuration of a Qwen3 text model, which norms queries and keys."""
    return transformers.Qwen3Config(
        **tiny_models._text_config(tokenizer),
        head_dim=16,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )


def gemma_text_config(tokenizer: Any) -> dict[str, Any]:
    """Returns fields that the text configurations of all Gemmas share."""
    return tiny_models._text_config(tokenizer) | {"head_dim": 16, "hidden_activation": "gelu_pytorch_tanh"}


def centre_gemma(text_model: Any) -> None:
    """Draws norms and embeddings again: Gemma multiplies by 1 + weight and by √width, and both should give about 1.

    Norms of queries and keys stay at 1.5, because nearly uniform attention would not distinguish tokens.
    """
    with torch.no_grad():
        text_model.embed_tokens.weight /= math.sqrt(text_model.config.hidden_size)
        for name, parameter in text_model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.sub_(0.5)
            elif name.endswith("norm.weight"):
                parameter.sub_(1.0)


def _redraw(name: str, parameter: torch.Tensor, generator: torch.Generator) -> None:
    """Draws again the weights of modules that Llama, Qwen2 and their towers do not have."""
    noise = torch.randn(parameter.shape, generator=generator)
    if name.endswith("image_newline") or "pos_embed" in name:
        parameter.copy_(noise)
    elif any(part in name for part in (".ln_", ".ln.", "_rms.")) and parameter.ndim == 1 and name.endswith("weight"):
        parameter.copy_(1.0 + 0.1 * noise)
    elif ".experts." in name and parameter.ndim == 3:
        # (experts, out, in), applied expert by expert.
        parameter.copy_(noise / math.sqrt(parameter.shape[-1]))


@functools.cache
def pixtral_processor_class() -> Any:
    """Imports PixtralProcessor without torchvision.

    Its module needs torchvision for one function, which the PIL image processor's module has, too. A stand-in module
    with that function replaces the torchvision one during the import.
    """
    package = "transformers.models.pixtral"
    original = f"{package}.image_processing_pixtral"
    stand_in = types.ModuleType(original)
    pil = importlib.import_module(f"{package}.image_processing_pil_pixtral")
    vars(stand_in)["get_resize_output_image_size"] = pil.get_resize_output_image_size
    is_missing = original not in sys.modules
    if is_missing:
        sys.modules[original] = stand_in
    try:
        return importlib.import_module(f"{package}.processing_pixtral").PixtralProcessor
    finally:
        if is_missing:
            del sys.modules[original]


QWEN_SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|image_pad|>", "<|video_pad|>"),
)


def pixtral_vision(longest: int, patch: int) -> Any:
    """Returns Pixtral's tower for images of at most `longest` pixels a side."""
    return transformers.PixtralVisionConfig(
        hidden_size=tiny_models.HIDDEN_SIZE,
        intermediate_size=2 * tiny_models.HIDDEN_SIZE,
        num_hidden_layers=tiny_models.NUM_LAYERS,
        num_attention_heads=4,
        image_size=longest,
        patch_size=patch,
        hidden_act="silu",
    )


def qwen_tokenizer(template: str) -> Any:
    """Trains a tokenizer with the special tokens of Qwen's vision-language models."""
    return tiny_models._tokenizer(
        list(QWEN_SPECIAL), bos=None, eos="<|im_end|>", pad="<|endoftext|>", template=template
    )


def qwen_token_ids(tokenizer: Any) -> dict[str, int]:
    """Returns the fields of a Qwen configuration that name tokens."""
    fields = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
    fields |= {"vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>"}
    return {f"{field}_token_id": tokenizer.convert_tokens_to_ids(token) for field, token in fields.items()}


MISTRAL_SPECIAL = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]")
