"""The form of a chat's answer depends on its functions and its template."""

from __future__ import annotations

import json
import pathlib

import pytest

from decoder_svc.prompt.chat_tools import ChatTools
from decoder_svc.prompt.prompt_spec import ChatMessage, ChatPrompt, ChatRole, TextPart
from decoder_svc.service import LoadedText
from decoder_svc.tools.tool import Tool, ToolCall, ToolChoice, ToolMode
from lookonce.errors import UnsupportedError
from tests.conftest import DEMO_MODEL
from tests.decoder_svc.conftest import loaded
from tests.tool_models import TEMPLATES, tool_folder, with_reasoning

PARAMETERS = {"type": "object", "properties": {"x": {"type": ["integer", "null"]}, "y": {}, "z": {"type": "string"}}}
TOOLS = (Tool("f", "", json.dumps(PARAMETERS)), Tool("g", "", ""))
QUESTION = (ChatMessage(ChatRole.USER, (TextPart("x"),)),)
MARKS = {"<|picture|>": "<tool_call>", "<|system|>": "</think>"}


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> LoadedText:
    """A model whose tokens 4 and 5 begin a call and end the reasoning."""
    return loaded(tool_folder(tmp_path_factory.mktemp("hermes") / "model", with_reasoning(TEMPLATES["hermes"]), MARKS))


def prompt_of(text: LoadedText, chat: ChatPrompt) -> list[int]:
    assert text.template is not None
    pieces = text.template.render(chat.messages, chat.shown_tools, chat.template_arguments)
    return text.tokenizer.encode_pieces(pieces)


def test_the_form_of_an_answer(hermes: LoadedText) -> None:
    tools = ChatTools(hermes.tokenizer, hermes.template)
    chat = ChatPrompt(QUESTION, TOOLS)
    form = tools.form_of(chat, prompt_of(hermes, chat))
    assert form is not None
    assert form.functions is not None
    assert form.functions.types == {
        "f": {"x": frozenset({"integer", "null"}), "y": frozenset(), "z": frozenset({"string"})},
        "g": {},
    }
    assert form.shown_token_ids == {4, 5}
    assert not form.begins_in_reasoning
    assert not form.is_single_call


def test_a_prompt_that_begins_the_reasoning(hermes: LoadedText) -> None:
    tools = ChatTools(hermes.tokenizer, hermes.template)
    for arguments, expected in (("", False), ('{"enable_thinking": true}', True)):
        chat = ChatPrompt(QUESTION, template_arguments=arguments)
        form = tools.form_of(chat, prompt_of(hermes, chat))
        assert form is not None
        assert form.begins_in_reasoning is expected
        assert form.functions is None


def test_a_prompt_that_has_ended_the_reasoning(tmp_path: pathlib.Path) -> None:
    source = TEMPLATES["hermes"] + "{%- if add_generation_prompt -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}"
    text = loaded(tool_folder(tmp_path / "model", source))
    chat = ChatPrompt(QUESTION, TOOLS, ToolChoice(ToolMode.REQUIRED))
    tools = ChatTools(text.tokenizer, text.template)
    form = tools.form_of(chat, prompt_of(text, chat))
    assert form is not None
    assert form.reasoning is None
    constraint = tools.constraint_of(chat, form)
    assert constraint is not None
    assert "think" not in constraint.text


def test_a_template_that_takes_one_call_only(tmp_path: pathlib.Path) -> None:
    source = TEMPLATES["llama"].replace(
        "{%- for tool_call in message.tool_calls -%}",
        "{%- if message.tool_calls | length != 1 -%}{{- raise_exception('only one') -}}{%- endif -%}"
        "{%- for tool_call in message.tool_calls -%}",
    )
    text = loaded(tool_folder(tmp_path / "model", source))
    assert text.template is not None
    assert text.template.tool_format is not None
    chat = ChatPrompt(QUESTION, TOOLS)
    form = ChatTools(text.tokenizer, text.template).form_of(chat, prompt_of(text, chat))
    assert form is not None
    assert form.is_single_call


def test_a_template_that_writes_parts_as_json_gets_results_as_texts(tmp_path: pathlib.Path) -> None:
    end = " -}}\n  {%- else"
    source = TEMPLATES["llama"].replace(f"text_of(message.content){end}", f"(message.content | tojson){end}")
    assert source != TEMPLATES["llama"]
    text = loaded(tool_folder(tmp_path / "model", source))
    call = ToolCall("abc", "f", "{}")
    messages = (
        *QUESTION,
        ChatMessage(ChatRole.ASSISTANT, (), (call,)),
        ChatMessage(ChatRole.TOOL, (TextPart("two"),), call_id="abc"),
    )
    assert text.template is not None
    assert '"two"' in "".join(piece.text for piece in text.template.render(messages))


@pytest.mark.parametrize(
    ("choice", "is_single"),
    [(ToolChoice(), False), (ToolChoice(is_single=True), True), (ToolChoice(ToolMode.NAMED, "f"), True)],
)
def test_single_calls(hermes: LoadedText, choice: ToolChoice, is_single: bool) -> None:
    chat = ChatPrompt(QUESTION, TOOLS, choice)
    form = ChatTools(hermes.tokenizer, hermes.template).form_of(chat, prompt_of(hermes, chat))
    assert form is not None
    assert form.is_single_call is is_single


def test_a_template_that_knows_neither_functions_nor_reasoning(demo_text: LoadedText) -> None:
    tools = ChatTools(demo_text.tokenizer, demo_text.template)
    assert tools.form_of(ChatPrompt(QUESTION), [1, 2]) is None
    with pytest.raises(UnsupportedError):
        tools.check(ChatPrompt(QUESTION, TOOLS))
    tools.check(ChatPrompt(QUESTION))


@pytest.fixture(scope="module")
def demo_text() -> LoadedText:
    return loaded(DEMO_MODEL)


def test_names_that_a_template_takes(tmp_path: pathlib.Path, hermes: LoadedText) -> None:
    assert hermes.template is not None
    assert hermes.template.argument_names == {"enable_thinking"}
    images = "{% for m in messages if m.content[0].type == 'image' %}<image>{% endfor %}"
    source = images + "{{ bos_token }}{{ tone }}{{ range(1) }}"
    source += "{% set own = 5 %}{{ own }}{% if depth is not defined %}{% set depth = 1 %}{% endif %}{{ depth }}"
    other = loaded(tool_folder(tmp_path / "other", source))
    assert other.template is not None
    assert other.template.argument_names == {"tone", "depth"}
    assert other.template.tool_format is None
