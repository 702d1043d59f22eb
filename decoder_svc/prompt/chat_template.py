"""Renders a conversation with the model's own chat template, and separates the template's text from the users' text.

Messages are data: nothing in them is run as template code, and user text stays marked as such wherever the template
puts it. Does not tokenize.
"""

from __future__ import annotations

import json
import math
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.meta
import jinja2.nodes

from decoder_svc.prompt.prompt_spec import ChatMessage, ChatRole
from decoder_svc.prompt.template_messages import UNMARKED_NAMES, TemplateForm, no_constant
from decoder_svc.prompt.text_marks import TextMarks
from decoder_svc.prompt.text_tokenizer import TextPiece
from decoder_svc.tools.answer_reader import REASONING_FORMATS
from decoder_svc.tools.tool import Tool
from decoder_svc.tools.tool_formats import PROBE_KEY, PROBE_NAME, PROBE_VALUE, ToolFormat, format_of
from lookonce.errors import InvalidParameterError, ModelFolderError, PromptEmptyError
from lookonce.model.model_folder import chat_template_source
from lookonce.model.template_errors import TEMPLATE_ERRORS

_ARGUMENTS = "chat.template_arguments"
_ARGUMENT_TEXT = re.compile(r"[A-Za-z0-9._-]{1,64}")
# A tag that transformers adds to Jinja.
_GENERATION_TAG = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
_SET_BY_TRANSFORMERS = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
    | {"raise_exception", "strftime_now", "tokenize", "chat_template", "return_dict", "conversation"}
)
_PROBE_FUNCTIONS = [
    {
        "type": "function",
        "function": {
            "name": PROBE_NAME,
            "description": "?",
            "parameters": {"type": "object", "properties": {PROBE_KEY: {"type": "string", "description": "?"}}},
        },
    }
]


class ChatTemplate:
    """The chat template of one model folder; safe to use from several threads at once."""

    def __init__(self, pretrained: Any, source: str, image_token: str, video_text: str | None = None) -> None:
        """`pretrained` is the folder's tokenizer in transformers, `source` the Jinja text.

        `video_text` is the placeholder of one video; None: the model takes no videos. Raises ModelFolderError if the
        template does not write `image_token` exactly once per image.
        """
        self._pretrained = pretrained
        self._source = source
        self._check_image_placement(image_token)
        # Whether the template writes a placeholder for a video.
        self.takes_videos = video_text is not None and self._writes_videos(video_text)
        # The form in which the model calls functions; None: the template knows no functions.
        self.tool_format = self._format_of_calls()
        self._has_text_results = not self._takes_results([{"type": "text", "text": PROBE_VALUE}])
        if self.tool_format is not None and self._has_text_results and not self._takes_results(PROBE_VALUE):
            self.tool_format = None
        # Whether a message may have more than one call. Llama's templates refuse that.
        self.takes_several_calls = self.tool_format is None or self._takes_several_calls()
        # Names of the template's own arguments.
        self.argument_names = _argument_names(source)
        # The texts around the model's reasoning; None: it marks none.
        self.reasoning = next((each for each in REASONING_FORMATS if each.end in source), None)

    @classmethod
    def load(
        cls, folder: pathlib.Path, pretrained: Any, image_token: str, video_text: str | None = None
    ) -> ChatTemplate | None:
        """Loads the folder's template; None without one.

        Looks into chat_template.jinja, chat_template.json and tokenizer_config.json.
        """
        source = chat_template_source(folder, pretrained.chat_template)
        return None if source is None else cls(pretrained, source, image_token, video_text)

    def render(
        self, messages: Sequence[ChatMessage], tools: Sequence[Tool] = (), arguments: str = ""
    ) -> list[TextPiece]:
        """Returns the rendered conversation up to the beginning of the assistant's answer.

        `tools` are the functions that the model sees, and `arguments` those of the template, as a JSON object.

        Raises PromptEmptyError without messages, and InvalidParameterError for arguments that the template does not
        take, and for a conversation that it refuses or that ends with an assistant message.
        """
        if not messages:
            raise PromptEmptyError("chat.messages is empty; send at least one message")
        if messages[-1].role is ChatRole.ASSISTANT:
            raise InvalidParameterError(
                "chat.messages",
                "the last message is the assistant's; continuing it is not supported, end with a user's",
            )
        values = self._arguments(arguments)
        try:
            form = TemplateForm(messages, tools, has_text_results=self._has_text_results)
            marks, rendered = self._rendered(form, values, is_whole=False)
            pieces = marks.bordered_pieces(rendered)
            if pieces is not None:
                return pieces
            # The template cut or dropped a text, for example reasoning: render again with marks in place of texts.
            marks, rendered = self._rendered(form, values, is_whole=True)
            return marks.whole_pieces(rendered)
        except RecursionError:
            raise InvalidParameterError("chat.tools", "a schema or an argument is nested too deeply") from None

    def _arguments(self, text: str) -> dict[str, Any]:
        """Returns the arguments of the template. Raises InvalidParameterError."""
        if not text:
            return {}
        try:
            values = json.loads(text, parse_constant=no_constant)
        except (ValueError, RecursionError):
            raise InvalidParameterError(_ARGUMENTS, "is no JSON") from None
        if not isinstance(values, dict):
            raise InvalidParameterError(_ARGUMENTS, "must be a JSON object")
        for name, value in values.items():
            if name not in self.argument_names:
                known = ", ".join(sorted(self.argument_names)) or "none"
                raise InvalidParameterError(_ARGUMENTS, f"the template takes no {name[:64]!r}; it takes {known}")
            is_plain = value is None or (isinstance(value, bool | int | float) and math.isfinite(value))
            if not is_plain and not (isinstance(value, str) and _ARGUMENT_TEXT.fullmatch(value)):
                raise InvalidParameterError(
                    _ARGUMENTS, f"{name} must be a boolean, a number, null or 1 to 64 characters of [A-Za-z0-9._-]"
                )
        return values

    def _rendered(self, form: TemplateForm, values: dict[str, Any], *, is_whole: bool) -> tuple[TextMarks, str]:
        """Returns the rendered conversation, with marks around texts, or with `is_whole` in place of them."""
        try:
            try:
                return self._rendered_once(form, values, is_whole=is_whole, in_text=False)
            except TypeError:
                # Some templates expect system and assistant messages as strings (Pixtral's does).
                return self._rendered_once(form, values, is_whole=is_whole, in_text=True)
        except TEMPLATE_ERRORS as error:
            # Exactly TemplateError: the template's author wrote the message. A subclass: Jinja did, and it stays here.
            reason = str(error) if type(error) is jinja2.TemplateError else "it could not be rendered"
            raise InvalidParameterError("chat.messages", f"the model's chat template refuses: {reason}") from None

    def _rendered_once(
        self, form: TemplateForm, values: dict[str, Any], *, is_whole: bool, in_text: bool
    ) -> tuple[TextMarks, str]:
        marks = TextMarks(form.values(), UNMARKED_NAMES)
        mark = marks.whole if is_whole else marks.bordered
        return marks, self._apply(form.conversation(marks, mark, in_text=in_text), form.functions(marks), values)

    def _apply(
        self,
        conversation: list[dict[str, Any]],
        functions: list[dict[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        rendered = self._pretrained.apply_chat_template(
            conversation,
            tools=functions,
            chat_template=self._source,
            add_generation_prompt=True,
            tokenize=False,
            **(arguments or {}),
        )
        return str(rendered)

    def _format_of_calls(self) -> ToolFormat | None:
        """Returns the form in which the template writes calls; None if it does not show the model its functions."""
        try:
            if PROBE_NAME not in self._apply(_probe()[:1], _PROBE_FUNCTIONS):
                return None
            return format_of(self._apply([*_probe()[:2], _result("?")], _PROBE_FUNCTIONS))
        except TEMPLATE_ERRORS:
            return None

    def _takes_results(self, content: str | list[dict[str, str]]) -> bool:
        """Whether the template writes such a result of a function, and nothing of the form that it has in Python."""
        try:
            rendered = self._apply([*_probe()[:2], _result(content)], _PROBE_FUNCTIONS)
        except TEMPLATE_ERRORS:
            return False
        written = rendered.rpartition(PROBE_KEY)[2]
        return PROBE_VALUE in written and not any(name in written for name in ("'text'", '"text"'))

    def _takes_several_calls(self) -> bool:
        """Whether the template writes a message with two calls."""
        question, message = _probe()
        message["tool_calls"] *= 2
        try:
            return self._apply([question, message, _result("?")], _PROBE_FUNCTIONS).count(PROBE_KEY) > 2
        except TEMPLATE_ERRORS:
            return False

    def _check_image_placement(self, image_token: str) -> None:
        try:
            num_written, num_without = self._num_written("image", image_token), self._num_written("text", image_token)
        except TEMPLATE_ERRORS as error:
            raise ModelFolderError(f"the chat template cannot be rendered: {error}") from error
        if num_written != 1:
            raise ModelFolderError(
                f"the chat template writes {num_written} × {image_token} for one image; it must be one"
            )
        if num_without:
            # The token stands for something else, such as the end of a message.
            raise ModelFolderError(
                f"the chat template writes {image_token}, which config.json names as the image token, without an "
                "image; use the config.json that belongs to the tokenizer"
            )

    def _writes_videos(self, text: str) -> bool:
        """Whether the template writes `text` exactly once for one video."""
        try:
            return self._num_written("video", text) == 1
        except TEMPLATE_ERRORS:
            return False

    def _num_written(self, part_type: str, text: str) -> int:
        """Returns how often the template writes `text` for one part of this type. Raises one of TEMPLATE_ERRORS."""
        first = {"type": "text", "text": "!"} if part_type == "text" else {"type": part_type}
        return self._apply([{"role": "user", "content": [first, {"type": "text", "text": "?"}]}]).count(text)


def _probe() -> list[dict[str, Any]]:
    """Returns a question, and a call of a function as the answer."""
    call = {
        "id": "abcdefghi",
        "type": "function",
        "function": {"name": PROBE_NAME, "arguments": {PROBE_KEY: PROBE_VALUE}},
    }
    return [
        {"role": "user", "content": [{"type": "text", "text": "?"}]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]


def _result(content: str | list[dict[str, str]]) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": "abcdefghi", "name": PROBE_NAME}


def _argument_names(source: str) -> frozenset[str]:
    """Returns the names that a template uses and that neither transformers nor the template itself sets.

    A name that the template sets counts if it asks whether the name is defined: so it gives an argument its default.
    """
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        tree = environment.parse(_GENERATION_TAG.sub("", source))
    except jinja2.TemplateError:
        return frozenset()
    stored = {name.name for name in tree.find_all(jinja2.nodes.Name) if name.ctx != "load"}
    asked = {
        node.node.name
        for node in tree.find_all((jinja2.nodes.Test, jinja2.nodes.Filter))
        if node.name in ("defined", "undefined", "default", "d") and isinstance(node.node, jinja2.nodes.Name)
    }
    names = jinja2.meta.find_undeclared_variables(tree) - (stored - asked)
    names -= environment.globals.keys() | _SET_BY_TRANSFORMERS
    return frozenset(name for name in names if not name.endswith("_token"))
