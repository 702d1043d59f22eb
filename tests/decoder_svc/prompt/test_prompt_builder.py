"""Prompts: token-equal to Hugging Face's processors with images in place, and the wrong ones refused by name."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from decoder_svc.prompt.family import DecoderFamily, load_family
from decoder_svc.prompt.prompt_builder import ResolvedImage
from decoder_svc.prompt.prompt_spec import (
    ChatMessage,
    ChatPrompt,
    ChatRole,
    ImagePart,
    PromptSpec,
    TextPart,
    TextPrompt,
    TokenPrompt,
)
from decoder_svc.scheduling.prompt import Span
from decoder_svc.service import LoadedText
from lookonce.content_key import ProcessorOptions
from lookonce.errors import (
    ContextTooLongError,
    ImageCountError,
    InvalidParameterError,
    LookonceError,
    ModelFolderError,
    PlaceholderMismatchError,
    PromptEmptyError,
    UnsupportedError,
)
from lookonce.families.base import ImageShape
from lookonce.families.sizing import constant
from lookonce.model.family_model import FamilyModel
from lookonce.model.pretrained_tokenizer import load_pretrained
from tests import image_files
from tests.decoder_svc.conftest import loaded
from tests.decoder_svc.prompt.prompts import builder, chat, inline, resolved
from tests.tiny_families import FAMILIES

SIZES = [(80, 60), (200, 50), (56, 168)]


def hugging_face_ids(processor: Any, parts: list[str | tuple[int, int]]) -> list[int]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in parts]
    images = [image_files.noise(0, *part) for part in parts if not isinstance(part, str)]
    rendered = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    bos = processor.tokenizer.bos_token
    has_bos = bos is not None and rendered.startswith(bos)
    encoded = processor(images=images or None, text=rendered, add_special_tokens=not has_bos)
    return list(encoded["input_ids"][0])


@pytest.mark.parametrize(
    "parts",
    [["what is it"], [SIZES[0], "what is it"], ["first", SIZES[0], "then", SIZES[1], SIZES[2], "which"]],
    ids=["no image", "one image", "three images"],
)
def test_token_equal_to_the_hugging_face_processor(
    any_text: LoadedText, any_processor: Any, parts: list[str | tuple[int, int]]
) -> None:
    sizes = [part for part in parts if not isinstance(part, str)]
    images = [resolved(bytes([index]), size) for index, size in enumerate(sizes)]
    spec = chat(*(part if isinstance(part, str) else inline() for part in parts))
    prompt = builder(any_text).build(spec, images)
    assert list(prompt.token_ids) == hugging_face_ids(any_processor, parts)
    for item, image in zip(prompt.images, images, strict=True):
        assert item.key == image.key
        assert item.data == image.data
        layout = any_text.family.image_layout(image.width, image.height, image.options)
        assert prompt.token_ids[item.span.offset : item.span.stop] == layout.token_ids
        assert item.num_rows == layout.num_rows


def test_chat_text_and_tokens_build_the_same_prompt(any_text: LoadedText, any_processor: Any) -> None:
    images = [resolved(b"a", SIZES[1]), resolved(b"b", SIZES[0])]
    sources = (inline(), inline())
    from_chat = builder(any_text).build(chat("x", sources[0], "y", sources[1], "z"), images)
    content = [{"type": "text", "text": word} if word else {"type": "image"} for word in ("x", "", "y", "", "z")]
    rendered = any_processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    specs: list[PromptSpec] = [
        TextPrompt(rendered, sources),
        TokenPrompt(tuple(any_text.tokenizer.encode_trusted(rendered)), sources),
        TokenPrompt(from_chat.token_ids, sources),
    ]
    for spec in specs:
        assert builder(any_text).build(spec, images) == from_chat


def test_a_placeholder_that_a_user_spells_takes_no_image(any_text: LoadedText) -> None:
    spelled = f"what is {any_text.family.image_token} or "
    prompt = builder(any_text).build(chat(spelled, inline(), "?"), [resolved()])
    assert len(prompt.images) == 1
    assert prompt.token_ids.count(any_text.family.image_token_id) == prompt.images[0].num_rows
    harmless = builder(any_text).build(chat(spelled), [])
    assert any_text.family.image_token_id not in harmless.token_ids


def text_of(text: LoadedText, num_placeholders: int) -> str:
    return "see " + f"{text.family.image_token} and " * num_placeholders


@pytest.mark.parametrize(("num_placeholders", "num_images"), [(0, 1), (1, 0), (2, 1), (1, 2)])
def test_a_text_needs_one_image_per_placeholder(llava_text: LoadedText, num_placeholders: int, num_images: int) -> None:
    spec = TextPrompt(text_of(llava_text, num_placeholders), (inline(),) * num_images)
    with pytest.raises(ImageCountError, match=f"{num_images} images for {num_placeholders} placeholders"):
        builder(llava_text).build(spec, [resolved()] * num_images)


@pytest.mark.parametrize(
    ("run_lengths", "num_images", "error"),
    [
        ((), 1, ImageCountError),
        ((16,), 0, ImageCountError),
        ((1,), 2, ImageCountError),
        ((15,), 1, PlaceholderMismatchError),
        ((17,), 1, PlaceholderMismatchError),
        ((16, 1), 2, PlaceholderMismatchError),
        ((15, 17), 2, PlaceholderMismatchError),
        ((8, 24), 2, PlaceholderMismatchError),
    ],
)
def test_token_prompts_with_other_placeholders_than_their_images_are_refused(
    llava_text: LoadedText, run_lengths: tuple[int, ...], num_images: int, error: type[LookonceError]
) -> None:
    """Every image of this model takes 16 tokens."""
    runs = [(20, *(llava_text.family.image_token_id,) * length) for length in run_lengths]
    spec = TokenPrompt((21, *(token for run in runs for token in run)), (inline(),) * num_images)
    with pytest.raises(error):
        builder(llava_text).build(spec, [resolved()] * num_images)


def test_neighbouring_images_in_expanded_tokens_are_told_apart_by_their_sizes(any_text: LoadedText) -> None:
    images = [resolved(b"a", SIZES[1]), resolved(b"b", SIZES[2])]
    layouts = [any_text.family.image_layout(*size, ProcessorOptions()) for size in SIZES[1:]]
    tokens = (20, *layouts[0].token_ids, *layouts[1].token_ids, 21)
    prompt = builder(any_text).build(TokenPrompt(tokens, (inline(), inline())), images)
    assert prompt.token_ids == tokens
    first, second = (item.span for item in prompt.images)
    assert (first.offset, first.stop, second.stop) == (1, second.offset, len(tokens) - 1)


def with_tags(text: LoadedText) -> LoadedText:
    """The same model, but each image is two rows between tokens that take none."""
    family = load_family(text.folder, load_pretrained(text.folder.path))
    tagged = replace(FamilyModel.load(text.folder), sizing=constant(ImageShape(("begin", 1, "between", 1, "end"))))
    tokenizer = load_pretrained(text.folder.path)
    encode = functools.partial(tokenizer.encode, add_special_tokens=False)
    token, token_id = family.image_token, family.image_token_id
    return replace(text, family=DecoderFamily(tagged, token, token_id, token_id, None, encode))


def test_layouts_with_tokens_that_take_no_row_are_placed_and_found_again(llava_text: LoadedText) -> None:
    text = with_tags(llava_text)
    image = text.family.image_token_id
    begin, between, end = (
        tuple(text.tokenizer.encode_trusted("<s>" + part)[1:]) for part in ("begin", "between", "end")
    )
    images, sources = [resolved(b"a"), resolved(b"b")], (inline(), inline())
    whole = (*begin, image, *between, image, *end)
    unexpanded = builder(text).build(TokenPrompt((20, image, image, 21), sources), images)
    assert unexpanded.token_ids == (20, *whole, *whole, 21)
    row_tokens = (0, 1 + len(between))
    assert [item.row_tokens for item in unexpanded.images] == [row_tokens, row_tokens]
    assert unexpanded.images[0].span == Span(1 + len(begin), 2 + len(between))
    assert builder(text).build(TokenPrompt(unexpanded.token_ids, sources), images) == unexpanded
    torn = (20, *begin, image, image, *end, *whole, 21)
    with pytest.raises(PlaceholderMismatchError):
        builder(text).build(TokenPrompt(torn, sources), images)


def test_texts_around_rows_are_tokenized_with_the_text_beside_them(llava_text: LoadedText) -> None:
    text = with_tags(llava_text)
    image = text.family.image_token
    prompt = builder(text).build(TextPrompt(f"<s>be{image}ginning", (inline(),)), [resolved()])
    assert list(prompt.token_ids) == text.tokenizer.encode_trusted(f"<s>bebegin{image}between{image}endginning")


def test_what_follows_an_image_decides_the_text_behind_it(tmp_path: pathlib.Path) -> None:
    """Idefics2: images without text between them share a marker, and a word behind a marker gets a space."""
    text = loaded(FAMILIES["idefics2"].build(tmp_path))
    marker = "<fake_token_around_image>"
    for parts, shown in (
        (("see", inline(), inline(), "word"), f"see{11 * marker} word"),
        ((inline(), "\nword", inline()), f"{6 * marker}\nword{6 * marker}"),
        ((inline(), "<b>"), f"{6 * marker}<b>"),
    ):
        num_images = sum(not isinstance(part, str) for part in parts)
        prompt = builder(text).build(chat(*parts), [resolved()] * num_images)
        decoded = text.tokenizer.decode(prompt.token_ids, skip_special_tokens=False).replace("<image>", "")
        assert decoded.split("User:")[1].lstrip(" ").startswith(f"{shown}<end_of_utterance>")
    image_id, marker_id = text.family.image_token_id, text.tokenizer.backend.token_to_id(marker)
    spec = TokenPrompt((20, image_id, image_id, 21, image_id), (inline(),) * 3)
    token_ids = builder(text).build(spec, [resolved()] * 3).token_ids
    assert token_ids.count(marker_id) == 11 + 6
    assert token_ids[-1] == marker_id
    assert builder(text).build(TokenPrompt(token_ids, spec.images), [resolved()] * 3).token_ids == token_ids


def test_images_are_numbered_over_the_whole_prompt(tmp_path: pathlib.Path) -> None:
    """MiniCPM-V 4.6: chat, text and tokens with placeholders or with whole images give the same numbers."""
    text = loaded(FAMILIES["minicpmv4_6"].build(tmp_path))
    images, sources = [resolved(data, (40, 40)) for data in (b"a", b"b", b"b")], (inline(),) * 3
    messages = [(ChatRole.USER, "see", 2), (ChatRole.ASSISTANT, "two", 0), (ChatRole.USER, "and", 1)]
    spec = ChatPrompt(
        tuple(
            ChatMessage(role, (TextPart(said), *(ImagePart(inline()) for _ in range(num_images))))
            for role, said, num_images in messages
        )
    )
    prompt = builder(text).build(spec, images)
    image_token = text.family.image_token
    shown = text.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
    numbered = [f"<image_id>{number}</image_id><image>{4 * image_token}</image>" for number in range(3)]
    assert shown.split("<|im_start|>user\n")[1].startswith(f"see{numbered[0]}{numbered[1]}<|im_end|>")
    assert shown.split("<|im_start|>user\n")[2].startswith(f"and{numbered[2]}<|im_end|>")
    rendered = shown
    for one in numbered:
        rendered = rendered.replace(one, image_token)
    for token_ids in (tuple(text.tokenizer.encode_trusted(rendered)), prompt.token_ids):
        assert builder(text).build(TokenPrompt(token_ids, sources), images) == prompt
    assert builder(text).build(TextPrompt(rendered, sources), images) == prompt


def test_rows_in_the_cache_must_be_those_of_the_layout(llava_text: LoadedText) -> None:
    image = resolved()
    wrong = ResolvedImage(image.key, image.width, image.height, image.options, None, num_rows=15)
    with pytest.raises(PlaceholderMismatchError, match="15"):
        builder(llava_text).build(chat(inline()), [wrong])


@pytest.mark.parametrize(
    ("spec", "error", "match"),
    [
        (ChatPrompt(()), PromptEmptyError, "messages"),
        (TextPrompt(""), PromptEmptyError, "text"),
        (TokenPrompt(()), PromptEmptyError, "token_ids"),
        (TokenPrompt((1, 5_000_000)), InvalidParameterError, "5000000"),
        (TokenPrompt((20,) * 513), ContextTooLongError, "513"),
        (TextPrompt("a" * 1_000_000), ContextTooLongError, "1000000"),
        (chat("a" * 500_000, "b" * 500_000), ContextTooLongError, "1000000"),
        (chat(*[inline()] * 5), ImageCountError, "limit is 4"),
        (chat(), InvalidParameterError, r"chat\.messages\[0\]\.parts"),
        (TextPrompt("x", (inline(options=ProcessorOptions(5000)),)), InvalidParameterError, "max_pixels"),
    ],
)
def test_prompts_that_can_be_refused_at_once_are(
    llava_text: LoadedText, spec: PromptSpec, error: type[LookonceError], match: str
) -> None:
    with pytest.raises(error, match=match):
        builder(llava_text).check(spec)


def test_without_chat_template_only_chat_is_refused(llava_text: LoadedText) -> None:
    text = replace(llava_text, template=None)
    with pytest.raises(UnsupportedError, match="template"):
        builder(text).check(chat("x"))
    builder(text).check(TextPrompt("x"))
    assert builder(text).build(TextPrompt("x"), []).token_ids


def test_a_family_with_bos_behind_its_images_needs_a_tokenizer_with_bos(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = loaded(FAMILIES["paligemma"].build(tmp_path / "paligemma"))
    builder(text)
    monkeypatch.setattr(text.tokenizer, "bos_token", None)
    with pytest.raises(ModelFolderError, match="bos_token"):
        builder(text)


def test_max_pixels_change_layout_and_key(model_folder: Callable[[str], pathlib.Path]) -> None:
    text = loaded(model_folder("qwen2_vl"))
    small = ProcessorOptions(6 * 28 * 28)
    spec = chat(inline(options=small))
    builder(text).check(spec)
    default = builder(text).build(chat(inline()), [resolved(size=(300, 300))])
    bounded = builder(text).build(spec, [resolved(size=(300, 300), options=small)])
    assert bounded.images[0].num_rows < default.images[0].num_rows
    assert bounded.images[0].key != default.images[0].key


@pytest.mark.parametrize(
    ("spec", "field"), [(chat("what"), "chat.messages"), (TextPrompt("what"), "text.text")], ids=["chat", "text"]
)
def test_a_token_beyond_the_models_vocabulary_is_refused(llava_text: LoadedText, spec: PromptSpec, field: str) -> None:
    last = max(builder(llava_text).build(spec, []).token_ids)
    whole = builder(replace(llava_text, vocab_size=last + 1))
    assert max(whole.build(spec, []).token_ids) == last
    with pytest.raises(InvalidParameterError, match=f"id {last}") as caught:
        builder(replace(llava_text, vocab_size=last)).build(spec, [])
    assert caught.value.field == field
