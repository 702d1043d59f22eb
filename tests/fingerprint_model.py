"""A tiny vision-language model that spells which embedding rows it read: one generated token for each row, in order.

An ordinary LLaVA folder (SigLIP tower, Llama), loaded by the code that loads any other; its weights are set by hand:

* An image is a board of GRID × GRID squares in eight colours, one embedding row per square. Tower and projector turn a
  square into the one-hot code of its colour.
* The language model copies. Each of its two heads attends to a fixed distance: from the end of a prompt the later head
  sees the first row of the last image, the earlier head the first row of the image before it. Both advance by one row
  with every generated token. The chat template puts the images after the text, so the distances are the same in all
  prompts.
* There is one token per pair of codes (seen by the earlier head, seen by the later head), e.g. " rk": a red and a black
  square. Text has codes, too, which distinguish texts loosely.

One wrong square in one row, or a row in the wrong place, therefore gives a wrong token. If the distance reaches before
the start of the sequence, the heads attend to its first token, which attracts them a little less than the right place.
"""

from __future__ import annotations

import io
import itertools
import json
import pathlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import PIL.Image
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from tests import tiny_models

GRID = 5
NUM_ROWS = GRID * GRID
COLOURS = "krgybmcw"
"""Letters of the colours: red is bit 0, green bit 1, blue bit 2."""
_TEXT_CODES = "pqst"
_CODES = COLOURS + _TEXT_CODES
_DARK, _BRIGHT = 40, 215
_PATCH_SIZE = 8
_SPECIAL = ("<pad>", "<s>", "</s>", "<image>")
_SUFFIX = "ASSISTANT:"
_TEMPLATE = (
    "{% for message in messages %}{{ message['role'].upper() + ': ' }}"
    "{% if message['content'] is string %}{{ message['content'] + ' ' }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] + ' ' }}{% endif %}{% endfor %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '" + _SUFFIX + "' }}{% endif %}"
)

# Features of a hidden state: a constant, the mark of the first token, the code, and the codes that each head has seen.
_HIDDEN_SIZE, _HEAD_DIM = 64, 64
_CONSTANT, _BEGINNING, _CODE = 0, 1, slice(2, 2 + len(_CODES))
_SEEN = [slice(start, start + len(_CODES)) for start in (_CODE.stop, _CODE.stop + len(_CODES))]
_NORM = 10.0
_SEEN_NORM = 20.0
_HEAD_GAIN = 4.0
# Attention: the score at the right distance, the frequencies of which it is a sum, and the share of it that the first
# token gets. No other distance up to 4096 has more than 0.91 of the score.
_PEAK, _NUM_FREQUENCIES, _BEGINNING_SHARE = 600.0, 12, 0.955
_ROPE_THETA = 10_000.0

Board: TypeAlias = tuple[int, ...]
"""Colours of the squares, row by row: indexes into COLOURS."""


def build(folder: pathlib.Path) -> pathlib.Path:
    """Writes the model's folder in the form of published models."""
    tokenizer = _tokenizer()
    config = transformers.LlavaConfig(
        vision_config=transformers.SiglipVisionConfig(
            hidden_size=_HIDDEN_SIZE, intermediate_size=_HIDDEN_SIZE, num_hidden_layers=1, num_attention_heads=1,
            image_size=GRID * _PATCH_SIZE, patch_size=_PATCH_SIZE, vision_use_head=False,
        ),
        text_config=transformers.LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=_HIDDEN_SIZE, intermediate_size=_HIDDEN_SIZE, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1, head_dim=_HEAD_DIM, max_position_embeddings=4096,
            tie_word_embeddings=False, rope_parameters={"rope_type": "default", "rope_theta": _ROPE_THETA},
            bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        ),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"), image_seq_length=NUM_ROWS,
        vision_feature_layer=-1, vision_feature_select_strategy="full", dtype=torch.float32,
    )  # fmt: skip
    model = transformers.LlavaForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
        _set_vision(model.model.vision_tower, model.model.multi_modal_projector)
        _set_language(model, tokenizer)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(model.generation_config, name, getattr(tokenizer, name))
    side = GRID * _PATCH_SIZE
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    SiglipImageProcessorPil(size={"height": side, "width": side}).save_pretrained(folder)
    processor = {"processor_class": "LlavaProcessor", "patch_size": _PATCH_SIZE, "image_token": "<image>"}
    processor |= {"vision_feature_select_strategy": "full", "num_additional_image_tokens": 0}
    (folder / "processor_config.json").write_text(json.dumps(processor, indent=2))
    return folder


def random_board(rng: random.Random) -> Board:
    """Returns one of 8^25 boards, so two boards of a test are never equal in practice."""
    return tuple(rng.choices(range(len(COLOURS)), k=NUM_ROWS))


def with_one_other_square(board: Board, rng: random.Random) -> Board:
    """Returns the board with one channel of one square changed."""
    place = rng.randrange(NUM_ROWS)
    return (*board[:place], board[place] ^ 1 << rng.randrange(3), *board[place + 1 :])


def draw(board: Board, width: int = 80, height: int = 80) -> PIL.Image.Image:
    """Returns the image of a board, in any size."""
    image = PIL.Image.new("RGB", (GRID, GRID))
    image.putdata([tuple(_BRIGHT if colour >> bit & 1 else _DARK for bit in range(3)) for colour in board])
    return image.resize((width, height), PIL.Image.Resampling.NEAREST)


def png(board: Board, width: int = 80, height: int = 80) -> bytes:
    """Returns the image as a PNG file."""
    buffer = io.BytesIO()
    draw(board, width, height).save(buffer, "PNG")
    return buffer.getvalue()


def large_jpeg(board: Board, side: int = 7000) -> bytes:
    """Returns the image as a progressive JPEG near the pixel limit, which takes more than a second to decode."""
    buffer = io.BytesIO()
    draw(board, side, side).save(buffer, "JPEG", quality=90, progressive=True)
    return buffer.getvalue()


def squares_in(text: str) -> str:
    """Returns the later head's letters of an answer: for a prompt with one image, its squares."""
    return "".join(word[1] for word in text.split())


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer that plain `transformers` generates."""

    token_ids: tuple[int, ...]
    text: str
    # [num_tokens, vocabulary]
    logits: torch.Tensor

    @property
    def margin(self) -> float:
        """Smallest difference between the best and the second-best logit over all tokens."""
        best = self.logits.topk(2).values
        return float((best[:, 0] - best[:, 1]).min())


class Reference:
    """The same folder in plain `transformers`, with rows of the caller's choice at the placeholders."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._processor = tiny_models.load_processor(folder)
        self._model = tiny_models.load_model(folder)

    def rows(self, boards: Sequence[Board], width: int = 80, height: int = 80) -> torch.Tensor:
        """Returns the embedding rows of images, [num_images, NUM_ROWS, hidden_size]."""
        images = [draw(board, width, height) for board in boards]
        pixels = self._processor.image_processor(images=images, return_tensors="pt")
        with torch.inference_mode():
            rows: torch.Tensor = torch.stack(list(self._model.get_image_features(**pixels).pooler_output))
        return rows

    def answer(self, question: str, boards: Sequence[Board] = (), *, max_tokens: int = NUM_ROWS) -> Answer:
        """Returns the greedy answer to one user turn."""
        rows = self.rows(boards) if boards else torch.zeros(0, NUM_ROWS, _HIDDEN_SIZE)
        return self.answer_rows(question, rows[None], max_tokens=max_tokens)[0]

    def answer_rows(self, question: str, rows: torch.Tensor, *, max_tokens: int = NUM_ROWS) -> list[Answer]:
        """Returns the greedy answers of one batch; `rows` is [num_prompts, num_images, NUM_ROWS, hidden_size]."""
        content = [{"type": "text", "text": question}, *({"type": "image"} for _ in range(rows.shape[1]))]
        text = self._processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        ids = self._processor.tokenizer(text.replace("<image>", "<image>" * NUM_ROWS), return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            states = self._model.get_input_embeddings()(ids).repeat(len(rows), 1, 1)
            states[:, ids[0] == self._model.config.image_token_id] = rows.flatten(1, 2)
            output = self._model.generate(
                inputs_embeds=states, attention_mask=torch.ones(states.shape[:2], dtype=torch.int64),
                max_new_tokens=max_tokens, do_sample=False, return_dict_in_generate=True, output_logits=True,
            )  # fmt: skip
        logits = torch.stack(output.logits, dim=1)
        return [
            Answer(tuple(tokens.tolist()), self._processor.tokenizer.decode(tokens), values)
            for tokens, values in zip(output.sequences, logits, strict=True)
        ]


def _tokenizer() -> Any:
    """Builds a byte tokenizer with additional answer tokens, which no text contains."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["Ġ" + earlier + later for earlier, later in itertools.product(_CODES, repeat=2)]
    vocabulary = {token: number for number, token in enumerate([*_SPECIAL, *letters, *words])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>",
        extra_special_tokens=["<image>"], chat_template=_TEMPLATE, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def _set_vision(tower: Any, projector: Any) -> None:
    """Sets square → mean of each channel in −1 … 1 → one unit per colour → its code, with a constant feature."""
    for bit in range(3):
        tower.embeddings.patch_embedding.weight[bit, bit] = 1.0 / _PATCH_SIZE**2
    level = (_BRIGHT - _DARK) / 255
    for colour in range(len(COLOURS)):
        signs = torch.tensor([1.0 if colour >> bit & 1 else -1.0 for bit in range(3)])
        # 3 × level for this colour, 1 × level for the nearest other one; GELU suppresses negative values.
        projector.linear_1.weight[colour, :3] = 8.0 / level * signs
        projector.linear_1.bias[colour] = -16.0
        projector.linear_2.weight[_CODE.start + colour, colour] = 1 / 8.0
    projector.linear_2.bias[_CONSTANT] = _NORM


def _set_language(model: Any, tokenizer: Any) -> None:
    embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    rng = random.Random(5)
    for token_id in range(len(tokenizer)):
        embeddings[token_id, _CODE.start + len(COLOURS) + rng.randrange(len(_TEXT_CODES))] = 1.0
    embeddings[:, _CONSTANT] = _NORM
    embeddings[tokenizer.bos_token_id, [_CONSTANT, _BEGINNING]] = torch.tensor([0.0, _NORM])
    attention = model.model.language_model.layers[0].self_attn
    for number, distance in enumerate(_distances(tokenizer)):
        _set_query(attention.q_proj.weight[number * _HEAD_DIM : (number + 1) * _HEAD_DIM], distance)
    _set_key(attention.k_proj.weight)
    # The features after the norm in front of the layer.
    scale = (_HIDDEN_SIZE / (_NORM**2 + 1)) ** 0.5
    for code in range(len(_CODES)):
        attention.v_proj.weight[code, _CODE.start + code] = 1.0 / scale
        for number, seen in enumerate(_SEEN):
            attention.o_proj.weight[seen.start + code, number * _HEAD_DIM + code] = _SEEN_NORM
    for first, second in itertools.product(range(len(_CODES)), repeat=2):
        token_id = tokenizer.convert_tokens_to_ids("Ġ" + _CODES[first] + _CODES[second])
        head[token_id, [_SEEN[0].start + first, _SEEN[1].start + second]] = _HEAD_GAIN


def _distances(tokenizer: Any) -> tuple[int, int]:
    """Returns the distances from a prompt's last token to the first rows of the last two images."""
    later = NUM_ROWS - 1 + len(tokenizer.encode(_SUFFIX, add_special_tokens=False))
    return later + NUM_ROWS, later


def _strength() -> float:
    """Returns the size of a query's and a key's components that gives the score _PEAK after scaling by 1/√head_dim."""
    scale = (_HIDDEN_SIZE / (_NORM**2 + 1)) ** 0.5
    return float((_PEAK * _HEAD_DIM**0.5 / _NUM_FREQUENCIES) ** 0.5 / (_NORM * scale))


def _set_query(weight: Any, distance: int) -> None:
    """Sets a constant query, rotated back by the angles that rotary positions add over `distance`."""
    half = _HEAD_DIM // 2
    for pair in range(_NUM_FREQUENCIES):
        angle = torch.tensor(distance * _ROPE_THETA ** (-pair / half))
        weight[pair, _CONSTANT] = _strength() * torch.cos(angle)
        weight[half + pair, _CONSTANT] = -_strength() * torch.sin(angle)
    weight[half - 1, _CONSTANT] = _strength() * _NUM_FREQUENCIES * _BEGINNING_SHARE


def _set_key(weight: Any) -> None:
    """Sets one key for all tokens; the first token's part uses the slowest frequency, to depend least on distance."""
    weight[:_NUM_FREQUENCIES, _CONSTANT] = _strength()
    weight[_HEAD_DIM // 2 - 1, _BEGINNING] = _strength()
