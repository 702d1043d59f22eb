"""Parses the input items of responses: messages, calls of functions, their results, and reasoning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gateway_svc.apis.parsing.content import MAX_PARTS, ROLES, Content, Part, Turn, content_of, image_part, role_of
from gateway_svc.apis.parsing.fields import Fields
from lookonce.generation import ToolCall

INPUT_NOTE = (
    "A text, or items. Messages have the roles system, developer (as system), user, assistant and parts `input_text`, "
    "`output_text` and `input_image` (a data URL or an address, and `detail`). A `function_call_output` is a text or "
    "such parts; images in it need a chat template that takes them. The `content` of a `reasoning` item is the "
    "reasoning of the answer behind it, and is dropped if none follows; its `summary` has no effect. A `reasoning` "
    "item, a message of the assistant and `function_call` items in a row are one answer. Other items are refused."
)


@dataclass(slots=True)
class _Answer:
    """An answer of the assistant, put together from its items."""

    where: str
    content: Content = field(default_factory=Content)
    calls: list[ToolCall] = field(default_factory=list)
    call_places: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether the answer has neither text nor calls."""
        return not self.content.parts and not self.calls

    def turn(self) -> Turn:
        """Returns the answer as one message of the assistant."""
        reasoning = "\n".join(self.reasoning)
        return Turn("assistant", self.content, self.where, self.calls, self.call_places, reasoning)


class _Conversation:
    """The messages of a request, from its items in their order."""

    def __init__(self) -> None:
        self._turns: list[Turn] = []
        # The answer to which further items may belong.
        self._answer: _Answer | None = None

    def add(self, item: Fields) -> None:
        """Adds an item. Raises InvalidParameterError for what is not served."""
        kind = item.text("type") or "message"
        if kind not in _ADDERS:
            raise item.wrong("type", f"must be {', '.join(_ADDERS)}")
        _ADDERS[kind](self, item)

    def turns(self) -> list[Turn]:
        """Returns the messages of all items that were added."""
        self._end_answer()
        return self._turns

    def _add_message(self, item: Fields) -> None:
        # An earlier answer, sent back as it was, has an id and a status.
        item.only("type", "role", "content", "id", "status")
        role = role_of(item, ROLES)
        content = content_of(item, "content", _part)
        if role == "assistant" and content.parts:
            has_text = self._answer is not None and bool(self._answer.content.parts)
            self._open_answer(item, is_new=has_text).content = content
        else:
            self._end_answer()
            self._turns.append(Turn(role, content, item.where))

    def _add_call(self, item: Fields) -> None:
        item.only("type", "id", "status", "call_id", "name", "arguments")
        call = ToolCall(
            item.needed("call_id", item.text("call_id")),
            item.needed("name", item.text("name")),
            item.needed("arguments", item.text("arguments")),
        )
        answer = self._open_answer(item)
        answer.calls.append(call)
        answer.call_places.append(item.where)

    def _add_result(self, item: Fields) -> None:
        item.only("type", "id", "status", "call_id", "output")
        call_id = item.needed("call_id", item.text("call_id"))
        self._end_answer()
        self._turns.append(Turn("tool", content_of(item, "output", _part), item.where, call_id=call_id))

    def _add_reasoning(self, item: Fields) -> None:
        item.only("type", "id", "status", "summary", "content", "encrypted_content")
        if item.raw("encrypted_content") is not None:
            raise item.wrong("encrypted_content", "is not supported; reasoning is sent as text here")
        texts = [
            _reasoning_text(Fields.of(part, f"{item.place('content')}[{index}]"))
            for index, part in enumerate(item.array("content") or [])
        ]
        if texts:
            answer = self._open_answer(item, is_new=self._answer is not None and not self._answer.is_empty)
            answer.reasoning += texts

    def _open_answer(self, item: Fields, *, is_new: bool = False) -> _Answer:
        """Returns the answer to which an item belongs."""
        if is_new:
            self._end_answer()
        if self._answer is None:
            self._answer = _Answer(item.where)
        return self._answer

    def _end_answer(self) -> None:
        if self._answer is not None and not self._answer.is_empty:
            self._turns.append(self._answer.turn())
        self._answer = None


_ADDERS: Mapping[str, Callable[[_Conversation, Fields], None]] = {
    "message": _Conversation._add_message,
    "function_call": _Conversation._add_call,
    "function_call_output": _Conversation._add_result,
    "reasoning": _Conversation._add_reasoning,
}


def response_turns(fields: Fields) -> list[Turn]:
    """Returns the messages of a request. Raises InvalidParameterError for what is not served."""
    given = fields.raw("input")
    if isinstance(given, str):
        return [Turn.of_text("user", given, "input")]
    items = fields.needed("input", fields.array("input"))
    if not 1 <= len(items) <= MAX_PARTS:
        raise fields.wrong("input", f"must have 1 to {MAX_PARTS} items")
    conversation = _Conversation()
    for index, item in enumerate(items):
        conversation.add(Fields.of(item, f"input[{index}]"))
    return conversation.turns()


def _reasoning_text(part: Fields) -> str:
    if part.only("type", "text").text("type") != "reasoning_text":
        raise part.wrong("type", "must be reasoning_text")
    return part.needed("text", part.text("text"))


def _part(part: Fields) -> Part:
    kind = part.text("type")
    if kind in ("input_text", "output_text"):
        return part.only("type", "text", "annotations", "logprobs").needed("text", part.text("text"))
    if kind != "input_image":
        raise part.wrong("type", "must be input_text, output_text or input_image")
    part.only("type", "image_url", "detail", "max_pixels")
    url = part.needed("image_url", part.text("image_url"))
    return image_part(part, url, part.text("detail"), part.integer("max_pixels"))
