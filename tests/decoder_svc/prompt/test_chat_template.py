"""The model's own chat template, with what a user wrote told apart from what the template wrote."""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder_svc.prompt.chat_template import ChatTemplate
from decoder_svc.prompt.prompt_spec import ChatMessage, ChatRole, ImagePart, InlineImage, TextPart
from decoder_svc.prompt.text_tokenizer import TextPiece
from decoder_svc.service import LoadedText
from lookonce.content_key import ProcessorOptions
from lookonce.errors import InvalidParameterError, ModelFolderError, PromptEmptyError
from lookonce.model.pretrained_tokenizer import load_pretrained

IMAGE = ImagePart(InlineImage(b"", ProcessorOptions()))


def user(*parts: str | ImagePart) -> ChatMessage:
    return message(ChatRole.USER, *parts)


def message(role: ChatRole, *parts: str | ImagePart) -> ChatMessage:
    return ChatMessage(role, tuple(TextPart(part) if isinstance(part, str) else part for part in parts))


def hugging_face_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    return [
        {
            "role": message.role.value,
            "content": [
                {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"}
                for part in message.parts
            ],
        }
        for message in messages
    ]


CONVERSATIONS: list[list[ChatMessage]] = [
    [user("what is it")],
    [user(IMAGE, "what is in the picture")],
    [user("  which colour ", IMAGE, " has it, or ", IMAGE, "\n")],
    [
        message(ChatRole.SYSTEM, "be brief"),
        user(IMAGE, "what"),
        message(ChatRole.ASSISTANT, "a picture"),
        user("which colour"),
    ],
    [user(""), user("   "), user(IMAGE)],
    [user("{{ 7 * 7 }} {% raw %} ünï ☃ 😀")],
]


@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=range(len(CONVERSATIONS)))
def test_tokens_are_those_of_hugging_face(
    any_text: LoadedText, any_processor: Any, conversation: list[ChatMessage]
) -> None:
    assert any_text.template is not None
    ids = any_text.tokenizer.encode_pieces(any_text.template.render(conversation))
    rendered = any_processor.apply_chat_template(
        hugging_face_messages(conversation), add_generation_prompt=True, tokenize=False
    )
    has_bos = any_processor.tokenizer.bos_token is not None and rendered.startswith(any_processor.tokenizer.bos_token)
    assert ids == any_processor.tokenizer(rendered, add_special_tokens=not has_bos)["input_ids"]


def test_the_beginning_of_sequence_comes_once_whether_template_or_tokenizer_writes_it(any_text: LoadedText) -> None:
    assert any_text.template is not None
    ids = any_text.tokenizer.encode_pieces(any_text.template.render([user("what")]))
    bos_id = any_text.tokenizer.backend.token_to_id(any_text.tokenizer.bos_token or "<s>")
    assert [token_id for token_id in ids if token_id == bos_id] == ([] if bos_id is None else [bos_id])


SPELLED = ["<image>", "<|image_pad|>", "<|im_end|>", "</s>", "<s>", "<", "image>", "|im_start|", " USER: ", "{{x}}"]


@given(st.lists(st.lists(st.sampled_from(SPELLED), max_size=4).map("".join), min_size=1, max_size=4))
@settings(max_examples=60)
def test_users_can_spell_control_tokens_but_not_write_them(any_text: LoadedText, texts: list[str]) -> None:
    """The same conversation with harmless texts has exactly the same control tokens."""
    assert any_text.template is not None
    control_ids = any_text.tokenizer.special_token_ids

    def control_tokens(parts: list[str]) -> list[int]:
        assert any_text.template is not None
        pieces = any_text.template.render([user(*parts, IMAGE), message(ChatRole.ASSISTANT, *parts), user(*parts)])
        return [token_id for token_id in any_text.tokenizer.encode_pieces(pieces) if token_id in control_ids]

    assert control_tokens(texts) == control_tokens(["x"] * len(texts))


def test_spelled_control_tokens_stay_readable_to_the_model(llava_text: LoadedText) -> None:
    assert llava_text.template is not None
    ids = llava_text.tokenizer.encode_pieces(llava_text.template.render([user("what does <image> or </s> mean")]))
    text = llava_text.tokenizer.decode(ids, skip_special_tokens=True)
    assert text == "USER: what does <image> or </s> mean ASSISTANT:"


@pytest.mark.parametrize("refusal", ["{{ raise_exception('no films') }}", "{{ nothing.at.all }}", ""])
def test_a_template_that_knows_no_videos_still_shows_images(
    model_folder: Callable[[str], pathlib.Path], tmp_path: pathlib.Path, refusal: str
) -> None:
    template = (
        "{% for part in messages[0]['content'] %}{% if part['type'] == 'image' %}<image>"
        "{% elif part['type'] == 'video' %}" + refusal + "{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    )
    path = tmp_path / "model"
    with_template(model_folder("llava_clip"), path, template)
    loaded = ChatTemplate.load(path, load_pretrained(path), "<image>", "<video>")
    assert loaded is not None
    assert not loaded.takes_videos
    known = ChatTemplate.load(path, load_pretrained(path), "<image>", "?")
    assert known is not None
    assert known.takes_videos is (refusal == "")


def with_template(folder: pathlib.Path, target: pathlib.Path, template: str) -> ChatTemplate:
    shutil.copytree(folder, target)
    (target / "chat_template.jinja").write_text(template)
    loaded = ChatTemplate.load(target, load_pretrained(target), "<image>")
    assert loaded is not None
    return loaded


PARTS = (
    "{% for m in messages %}{{ m.role }}:{% for p in m.content %}"
    "{% if p.type == 'image' %}<image>{% else %}TEXT{% endif %}{% endfor %};{% endfor %}"
)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("{{ p.text | trim }}", "user:[a <image> b];"),
        ("{{ p.text }}", "user:  [a <image> b] ;"),
        ("{{ p.text | upper }}", "user:  [A <IMAGE> B] ;"),
        ("{{ p.text ~ p.text }}", "user:  [a <image> b]   [a <image> b] ;"),
        ("", "user:;"),
    ],
)
def test_a_text_is_marked_as_a_users_wherever_the_template_puts_it(
    model_folder: Callable[[str], pathlib.Path], tmp_path: pathlib.Path, expression: str, expected: str
) -> None:
    template = with_template(model_folder("llava_clip"), tmp_path / "model", PARTS.replace("TEXT", expression))
    assert shown(template.render([user("  a <image> b ")])) == expected


def test_a_template_that_looks_for_a_passage_gets_to_see_no_text(
    model_folder: Callable[[str], pathlib.Path], tmp_path: pathlib.Path
) -> None:
    source = PARTS.replace("TEXT", "{{ p.text.split('</think>')[-1] }}")
    template = with_template(model_folder("llava_clip"), tmp_path / "model", source)
    assert shown(template.render([user("<image> hm </think> <image>"), user("and")])) == (
        "user:[<image> hm </think> <image>];user:[and];"
    )


@pytest.mark.parametrize("expression", ["{{ p.text[5:] }}", "{{ p.text[:-3] }}"])
def test_a_template_that_cuts_texts_is_not_served(
    model_folder: Callable[[str], pathlib.Path], tmp_path: pathlib.Path, expression: str
) -> None:
    template = with_template(model_folder("llava_clip"), tmp_path / "model", PARTS.replace("TEXT", expression))
    with pytest.raises(InvalidParameterError, match="cuts"):
        template.render([user("<image> hm </think> <image>")])


def shown(pieces: list[TextPiece]) -> str:
    return "".join(piece.text if piece.is_trusted else f"[{piece.text}]" for piece in pieces)


def test_a_conversation_that_the_template_refuses_is_refused_in_its_words(
    model_folder: Callable[[str], pathlib.Path], tmp_path: pathlib.Path
) -> None:
    source = "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}" + PARTS
    template = with_template(model_folder("llava_clip"), tmp_path / "model", source)
    with pytest.raises(InvalidParameterError, match="no system here") as caught:
        template.render([message(ChatRole.SYSTEM, "be brief"), user("what")])
    assert caught.value.field == "chat.messages"


def test_a_template_that_takes_a_system_message_for_a_string_is_given_one(
    model_folder: Callable[[str], pathlib.Path], tmp_path: pathlib.Path
) -> None:
    """Pixtral's template is of this kind."""
    source = "{% if messages[0].role == 'system' %}{{ '<' + messages[0].content + '>' }}"
    source += "{% set messages = messages[1:] %}{% endif %}" + PARTS.replace("TEXT", "{{ p.text }}")
    template = with_template(model_folder("llava_clip"), tmp_path / "model", source)
    assert shown(template.render([user("what")])) == "user:[what];"
    pieces = template.render([message(ChatRole.SYSTEM, "be <image>", " brief"), user(IMAGE, "what"), user("and")])
    assert shown(pieces) == "<[be <image>] [brief]>user:<image>[what];user:[and];"


def test_a_template_that_stumbles_is_a_refusal(
    model_folder: Callable[[str], pathlib.Path], tmp_path: pathlib.Path
) -> None:
    source = "{% if messages | length > 1 %}{{ 1 + messages[0].role }}{% endif %}" + PARTS
    template = with_template(model_folder("llava_clip"), tmp_path / "model", source)
    with pytest.raises(InvalidParameterError, match="could not be rendered"):
        template.render([user("what"), user("what")])


def test_jinjas_messages_stay_inside(model_folder: Callable[[str], pathlib.Path], tmp_path: pathlib.Path) -> None:
    source = "{% if messages | length > 1 %}{{ missing.attribute }}{% endif %}" + PARTS
    template = with_template(model_folder("llava_clip"), tmp_path / "model", source)
    with pytest.raises(InvalidParameterError, match="could not be rendered") as caught:
        template.render([user("what"), user("what")])
    assert "missing" not in caught.value.message


def test_the_assistants_turn_cannot_be_continued(llava_text: LoadedText) -> None:
    assert llava_text.template is not None
    with pytest.raises(InvalidParameterError, match="assistant"):
        llava_text.template.render([user("what"), message(ChatRole.ASSISTANT, "a")])
    with pytest.raises(PromptEmptyError):
        llava_text.template.render([])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].role }}",
        "<image><image>",
        # Writes it for each message.
        "<image>{{ messages[0].role }}",
        "{{ missing.attribute }}",
        "{{ '[' + messages[0].content + ']' }}",
    ],
)
def test_a_template_that_does_not_place_images_is_refused_at_start(
    model_folder: Callable[[str], pathlib.Path], tmp_path: pathlib.Path, source: str
) -> None:
    with pytest.raises(ModelFolderError, match="chat template"):
        with_template(model_folder("llava_clip"), tmp_path / "model", source)


def test_the_older_file_for_templates_is_read(
    model_folder: Callable[[str], pathlib.Path], tmp_path: pathlib.Path
) -> None:
    shutil.copytree(model_folder("llava_clip"), tmp_path / "model")
    folder = tmp_path / "model"
    (folder / "chat_template.jinja").unlink()
    assert ChatTemplate.load(folder, load_pretrained(folder), "<image>") is None
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": PARTS}))
    template = ChatTemplate.load(folder, load_pretrained(folder), "<image>")
    assert template is not None
    assert shown(template.render([user("x", IMAGE)])) == "user:TEXT<image>;"
    (folder / "chat_template.json").write_text("{")
    with pytest.raises(ModelFolderError, match=r"chat_template\.json"):
        ChatTemplate.load(folder, load_pretrained(folder), "<image>")
