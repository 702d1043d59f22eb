"""Conversations with functions in the form that templates take, and what users' data can do in them."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from decoder_svc.prompt.chat_template import ChatTemplate
from decoder_svc.prompt.prompt_spec import ChatMessage, ChatRole, TextPart
from decoder_svc.service import LoadedText
from decoder_svc.tools.tool import Tool, ToolCall
from lookonce.errors import InvalidParameterError
from tests.decoder_svc.conftest import loaded
from tests.tool_models import TEMPLATES, tool_folder

SPELLED = st.sampled_from(
    ["<eos>", "<bos>", "<image>", "<|user|>", "<", "|user|>", "eos>", "x", " ", "\n", '"', "\\", "type"]
)
TEXTS = st.lists(SPELLED, max_size=4).map("".join)
NAMES = st.from_regex("[a-c]{1,2}", fullmatch=True)
VALUES = st.recursive(
    TEXTS | st.integers(0, 9) | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(TEXTS, VALUES, max_size=3)


@pytest.fixture(scope="module", params=sorted(TEMPLATES))
def any_form(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedText:
    """A model for each form of calls."""
    return loaded(tool_folder(tmp_path_factory.mktemp("form") / request.param, TEMPLATES[request.param]))


def conversation(texts: Mapping[str, str], arguments: dict[str, Any]) -> list[ChatMessage]:
    call = ToolCall("call_1", "a", json.dumps(arguments))
    return [
        ChatMessage(ChatRole.USER, (TextPart(texts["question"]),)),
        ChatMessage(ChatRole.ASSISTANT, (TextPart(texts["answer"]),), (call,)),
        ChatMessage(ChatRole.TOOL, (TextPart(texts["result"]),), call_id="call_1"),
    ]


def template_of(text: LoadedText) -> ChatTemplate:
    assert text.template is not None
    return text.template


@given(
    st.fixed_dictionaries({"question": TEXTS, "answer": TEXTS, "result": TEXTS, "description": TEXTS}), OBJECTS, OBJECTS
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_the_prompt_is_that_of_transformers_and_has_the_templates_control_tokens_only(
    any_form: LoadedText, texts: dict[str, str], schema: dict[str, Any], arguments: dict[str, Any]
) -> None:
    template = template_of(any_form)
    parameters = {"type": "object", "properties": schema}
    tools = [Tool("a", texts["description"], json.dumps(parameters))]
    pieces = template.render(conversation(texts, arguments), tools)
    rendered = "".join(piece.text for piece in pieces)
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "a", "arguments": arguments}}
    expected = template._pretrained.apply_chat_template(
        [
            {"role": "user", "content": texts["question"]},
            {"role": "assistant", "content": texts["answer"], "tool_calls": [call]},
            {"role": "tool", "content": texts["result"], "tool_call_id": "abcdefghi", "name": "a"},
        ],
        tools=[
            {
                "type": "function",
                "function": {"name": "a", "description": texts["description"], "parameters": parameters},
            }
        ],
        chat_template=template._source,
        add_generation_prompt=True,
        tokenize=False,
    )
    if "id" in rendered and '"id": "' in expected:
        start = rendered.index('"id": "') if '"id": "' in rendered else -1
        expected = expected.replace("abcdefghi", rendered[start + 7 : start + 16])
    assert rendered == expected

    def control_ids(pieces: Any) -> list[int]:
        return [token_id for token_id in any_form.tokenizer.encode_pieces(pieces) if token_id < 8]

    harmless = template.render(conversation(dict.fromkeys(texts, "x"), {}), [Tool("a", "x", "")])
    assert control_ids(pieces) == control_ids(harmless)


def test_ids_keep_their_form_or_get_it(tmp_path: pathlib.Path) -> None:
    text = loaded(tool_folder(tmp_path / "model", TEMPLATES["mistral_list"]))
    texts = dict.fromkeys(("question", "answer", "result"), "x")
    for given_id, is_kept in (("abcDEF123", True), ("call_1", False), ("<eos><eos>", False)):
        messages = conversation(texts, {})
        call = ToolCall(given_id, "a", "{}")
        messages[1:] = [
            ChatMessage(ChatRole.ASSISTANT, (), (call,)),
            ChatMessage(ChatRole.TOOL, (TextPart("x"),), call_id=given_id),
        ]
        rendered = "".join(piece.text for piece in template_of(text).render(messages))
        shown = rendered.partition('"id": "')[2].partition('"')[0]
        assert len(shown) == 9
        assert shown.isalnum()
        assert (shown == given_id) is is_kept


@pytest.mark.parametrize("parameters", ["[]", "5", "{", '{"a": NaN}', "[" * 9000])
def test_parameters_that_are_no_object_are_named(tmp_path: pathlib.Path, parameters: str) -> None:
    text = loaded(tool_folder(tmp_path / "model", TEMPLATES["hermes"]))
    with pytest.raises(InvalidParameterError) as caught:
        template_of(text).render([ChatMessage(ChatRole.USER, (TextPart("x"),))], [Tool("a", "", parameters)])
    assert caught.value.field == "chat.tools[0].parameters"


def test_deep_schemas_are_refused(tmp_path: pathlib.Path) -> None:
    text = loaded(tool_folder(tmp_path / "model", TEMPLATES["hermes"]))
    deep = '{"items": ' * 600 + "{}" + "}" * 600
    with pytest.raises(InvalidParameterError, match=r"nested too deeply|could not be rendered"):
        template_of(text).render([ChatMessage(ChatRole.USER, (TextPart("x"),))], [Tool("a", "", deep)])
