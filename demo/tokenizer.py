"""Trains the demo model's tokenizer: byte-level BPE over the training wordings, so that any UTF-8 text round-trips.

It defines the special tokens and the chat template.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from demo.questions import ask_any
from demo.scenes import random_scene
from demo.wordings import SYSTEM_TEXTS, QuestionKind, Split

PAD, BOS, EOS, IMAGE, PICTURE = "<pad>", "<bos>", "<eos>", "<image>", "<|picture|>"
ROLE_TOKENS: Final = {role: f"<|{role}|>" for role in ("system", "user", "assistant")}
SPECIAL_TOKENS: Final = (PAD, BOS, EOS, IMAGE, PICTURE, *ROLE_TOKENS.values())
VOCABULARY_SIZE: Final = 600
NUM_POSITIONS: Final = 2048

# JSON is spelled with the tokens of the other answers: its own would take places from the words of questions.
_KINDS: Final = tuple(kind for kind in QuestionKind if kind is not QuestionKind.LIST)

CHAT_TEMPLATE: Final = """\
{#- Pictures are numbered through the whole chat, so that "the second picture" has something to point at. -#}
{%- set seen = namespace(pictures=0) -%}
{{- bos_token -}}
{%- for message in messages -%}
  {%- if message['role'] not in ('system', 'user', 'assistant') -%}
    {{- raise_exception("role must be system, user or assistant, not " + message['role']) -}}
  {%- endif -%}
  {{- '<|' + message['role'] + '|>' -}}
  {%- if message['content'] is string -%}
    {{- message['content'] -}}
  {%- else -%}
    {%- for part in message['content'] -%}
      {%- if part['type'] == 'image' -%}
        {%- set seen.pictures = seen.pictures + 1 -%}
        {{- '<|picture|>' + seen.pictures|string + '<image>' -}}
      {%- elif part['type'] == 'text' -%}
        {{- part['text'] -}}
      {%- else -%}
        {{- raise_exception("content type must be image or text, not " + part['type']) -}}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
  {%- if message['role'] == 'assistant' -%}{{- eos_token -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def train_tokenizer(seed: int, num_questions: int = 20_000) -> PreTrainedTokenizerFast:
    """Learns the merges from `num_questions` training questions and their answers, without held-out wordings."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_texts(seed, num_questions), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        extra_special_tokens={"image_token": IMAGE},
        additional_special_tokens=[PICTURE, *ROLE_TOKENS.values()],
        padding_side="left",
        model_max_length=NUM_POSITIONS,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def _training_texts(seed: int, num_questions: int) -> Iterator[str]:
    rng = random.Random(seed)
    scenes = [random_scene(rng.randrange(1000)) for _ in range(100)]
    yield from SYSTEM_TEXTS
    for _ in range(num_questions):
        question = ask_any(rng.sample(scenes, rng.choice((1, 2, 3))), Split.TRAINING, rng, _KINDS)
        yield question.text
        yield question.answer
