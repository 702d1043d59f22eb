"""A tiny GOT-OCR 2.0: pages of 128 px, SAM's tower on 16 × 16 patches with windows of 5, 16 rows, Qwen2 text."""

from __future__ import annotations

import pathlib
from typing import Any

import transformers
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from tests import tiny_models
from tests.tiny_families import parts

NAME = "got_ocr2"
PAGE = 128
ROWS = 16

# Published files have no template; this one writes what the models' own processor writes around an image.
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<img><imgpad></img>\n' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Writes the model's folder and returns its path."""
    tokenizer = parts.named_tokenizer(
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<img>", "</img>", "<imgpad>"],
        {},
        bos=None,
        eos="<|im_end|>",
        pad="<|endoftext|>",
        template=_TEMPLATE,
    )
    config = transformers.GotOcr2Config(
        vision_config={
            "hidden_size": tiny_models.HIDDEN_SIZE,
            "output_channels": 32,
            "num_hidden_layers": tiny_models.NUM_LAYERS,
            "num_attention_heads": 4,
            "image_size": PAGE,
            "patch_size": 8,
            "window_size": 5,
            "global_attn_indexes": [1],
            "mlp_dim": 2 * tiny_models.HIDDEN_SIZE,
        },
        text_config=transformers.Qwen2Config(
            **tiny_models._text_config(tokenizer), rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}
        ),
        image_token_index=tokenizer.convert_tokens_to_ids("<imgpad>"),
        image_seq_length=ROWS,
        tie_word_embeddings=False,
    )
    model = parts.random_model(
        transformers.GotOcr2ForConditionalGeneration, config, tokenizer, seed, gains=parts.ATTENTIVE
    )
    # The whole processor switches tiling off, whatever the image processor's file says.
    images = GotOcr2ImageProcessorPil(size={"height": PAGE, "width": PAGE}, crop_to_patches=True)
    return tiny_models._save(folder, model, tokenizer, images, {"processor_class": "GotOcr2Processor"})


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole processor on the PIL backend, for prompts without images, too."""
    return parts.load(folder, _PromptProcessor)


class _PromptProcessor(transformers.GotOcr2Processor):  # type: ignore[misc]
    """GOT-OCR's processor with the calling convention of the others.

    The original demands an image, takes a prompt's images as a flat list, and has a fixed number of rows.
    """

    num_image_tokens = ROWS

    def __call__(self, images: Any = None, text: Any = None, **options: Any) -> Any:
        """Takes the images of one prompt as a list within a list."""
        if images is None:
            return self.tokenizer(text, **options)
        return super().__call__(images=[image for prompt in images for image in prompt], text=text, **options)
