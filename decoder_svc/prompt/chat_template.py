"""Renders a conversation with the model's own chat template, and separates the template's text from the users' text.

Messages are data: nothing in them is run as template code, and user text stays marked as such wherever the template
puts it. Does not tokenize.
"""

from __future__ import annotations

import pathlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jinja2

from decoder_svc.prompt.prompt_spec import ChatMessage, ChatRole, ImagePart, TextPart, VideoPart
from decoder_svc.prompt.text_tokenizer import TextPiece
from lookonce.errors import InvalidParameterError, ModelFolderError, PromptEmptyError
from lookonce.model.model_folder import chat_template_source
from lookonce.model.template_errors import TEMPLATE_ERRORS

# Marks consist of digits only: no case filter or escaping of a template changes them.
_NONCE_DIGITS = 32
_INDEX_DIGITS = 6
# Digits at a mark's beginning or end by which a damaged mark is recognised.
_FRAGMENT_DIGITS = 10
_OPEN, _CLOSE, _WHOLE = "1", "2", "3"


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

    @classmethod
    def load(
        cls, folder: pathlib.Path, pretrained: Any, image_token: str, video_text: str | None = None
    ) -> ChatTemplate | None:
        """Loads the folder's template; None without one.

        Looks into chat_template.jinja, chat_template.json and tokenizer_config.json.
        """
        source = chat_template_source(folder, pretrained.chat_template)
        return None if source is None else cls(pretrained, source, image_token, video_text)

    def render(self, messages: Sequence[ChatMessage]) -> list[TextPiece]:
        """Returns the rendered conversation up to the beginning of the assistant's answer.

        Raises PromptEmptyError without messages, and InvalidParameterError for a conversation that the template refuses
        or that ends with an assistant message.
        """
        if not messages:
            raise PromptEmptyError("chat.messages is empty; send at least one message")
        if messages[-1].role is ChatRole.ASSISTANT:
            raise InvalidParameterError(
                "chat.messages",
                "the last message is the assistant's; continuing it is not supported, end with a user's",
            )
        marks = _Marks()
        pieces = marks.bordered_pieces(self._rendered(messages, marks.bordered))
        if pieces is not None:
            return pieces
        # The template cut a text, for example to drop a thinking passage: render again with marks in place of texts.
        marks = _Marks()
        return marks.whole_pieces(self._rendered(messages, marks.whole))

    def _rendered(self, messages: Sequence[ChatMessage], mark: Callable[[str], str]) -> str:
        try:
            try:
                return self._apply([_in_parts(message, mark) for message in messages])
            except TypeError:
                # Some templates expect system and assistant messages as strings (Pixtral's does).
                return self._apply([_in_text(message, mark) for message in messages])
        except TEMPLATE_ERRORS as error:
            # Exactly TemplateError: the template's author wrote the message. A subclass: Jinja did, and it stays here.
            reason = str(error) if type(error) is jinja2.TemplateError else "it could not be rendered"
            raise InvalidParameterError("chat.messages", f"the model's chat template refuses: {reason}") from None

    def _apply(self, conversation: list[dict[str, Any]]) -> str:
        rendered = self._pretrained.apply_chat_template(
            conversation, chat_template=self._source, add_generation_prompt=True, tokenize=False
        )
        return str(rendered)

    def _check_image_placement(self, image_token: str) -> None:
        try:
            num_written = self._num_written("image", image_token)
        except TEMPLATE_ERRORS as error:
            raise ModelFolderError(f"the chat template cannot be rendered: {error}") from error
        if num_written != 1:
            raise ModelFolderError(
                f"the chat template writes {num_written} × {image_token} for one image; it must be one"
            )

    def _writes_videos(self, text: str) -> bool:
        """Whether the template writes `text` exactly once for one video."""
        try:
            return self._num_written("video", text) == 1
        except TEMPLATE_ERRORS:
            return False

    def _num_written(self, part_type: str, text: str) -> int:
        """Returns how often the template writes `text` for one part of this type. Raises one of TEMPLATE_ERRORS."""
        return self._apply([{"role": "user", "content": [{"type": part_type}, {"type": "text", "text": "?"}]}]).count(
            text
        )


class _Mark(NamedTuple):
    """One mark in a rendered string, [start, stop)."""

    start: int
    stop: int
    # The text's index in digits, and the mark's kind: _OPEN, _CLOSE or _WHOLE.
    number: str
    kind: str


class _Marks:
    """Random marks around the texts of one conversation, by which they are found in the rendered string."""

    def __init__(self) -> None:
        self._nonce = str(secrets.randbelow(9 * 10 ** (_NONCE_DIGITS - 1)) + 10 ** (_NONCE_DIGITS - 1))
        self._texts: list[str] = []

    def bordered(self, text: str) -> str:
        """Returns the text with a mark before its first and after its last visible character.

        White space stays outside the marks, so that a template can still strip it.
        """
        return self._marked(text, lambda index, core: f"{self._nonce}{index}{_OPEN}{core}{self._nonce}{index}{_CLOSE}")

    def whole(self, text: str) -> str:
        """Returns the text with one mark in place of everything from its first to its last visible character."""
        return self._marked(text, lambda index, core: f"{self._nonce}{index}{_WHOLE}")

    def bordered_pieces(self, rendered: str) -> list[TextPiece] | None:
        """Splits a string rendered from bordered texts into pieces; None if a text lost one of its two marks."""
        pieces: list[TextPiece] = []
        end, opened = 0, None
        for mark in self._found(rendered):
            if opened != (None if mark.kind == _OPEN else mark.number):
                return None
            pieces.append(TextPiece(rendered[end : mark.start], is_trusted=mark.kind == _OPEN))
            end, opened = mark.stop, mark.number if mark.kind == _OPEN else None
        if opened is not None:
            return None
        return _non_empty([*pieces, TextPiece(rendered[end:], is_trusted=True)])

    def whole_pieces(self, rendered: str) -> list[TextPiece]:
        """Splits a string rendered from marks in place of texts into pieces.

        Raises InvalidParameterError if the template kept only a part of a mark.
        """
        pieces: list[TextPiece] = []
        end = 0
        for mark in self._found(rendered):
            pieces.append(TextPiece(rendered[end : mark.start], is_trusted=True))
            pieces.append(TextPiece(self._texts[int(mark.number)], is_trusted=False))
            end = mark.stop
        pieces.append(TextPiece(rendered[end:], is_trusted=True))
        fragments = (self._nonce[:_FRAGMENT_DIGITS], self._nonce[-_FRAGMENT_DIGITS:])
        if any(piece.is_trusted and fragment in piece.text for piece in pieces for fragment in fragments):
            raise InvalidParameterError("chat.messages", "the model's chat template cuts the messages' texts")
        return _non_empty(pieces)

    def _found(self, rendered: str) -> Iterator[_Mark]:
        """Yields all marks in order.

        Uses no regular expression: compiling one per conversation took a third of the rendering time.
        """
        start = 0
        while (start := rendered.find(self._nonce, start)) >= 0:
            stop = start + _NONCE_DIGITS + _INDEX_DIGITS + 1
            number, kind = rendered[start + _NONCE_DIGITS : stop - 1], rendered[stop - 1 : stop]
            if number.isdecimal() and kind in (_OPEN, _CLOSE, _WHOLE):
                yield _Mark(start, stop, number, kind)
                start = stop
            else:
                start += 1

    def _marked(self, text: str, mark: Callable[[str, str], str]) -> str:
        core = text.strip()
        if not core:
            return text
        start = text.find(core)
        self._texts.append(core)
        index = f"{len(self._texts) - 1:0{_INDEX_DIGITS}d}"
        return text[:start] + mark(index, core) + text[start + len(core) :]


def _non_empty(pieces: list[TextPiece]) -> list[TextPiece]:
    return [piece for piece in pieces if piece.text]


def _in_parts(message: ChatMessage, mark: Callable[[str], str]) -> dict[str, Any]:
    return {"role": message.role.value, "content": [_template_part(part, mark) for part in message.parts]}


def _in_text(message: ChatMessage, mark: Callable[[str], str]) -> dict[str, Any]:
    """Returns the message with a plain string as content; a user's message or one with images keeps its parts."""
    texts = [mark(part.text) for part in message.parts if isinstance(part, TextPart)]
    if message.role is ChatRole.USER or len(texts) < len(message.parts):
        return _in_parts(message, mark)
    return {"role": message.role.value, "content": "".join(texts)}


def _template_part(part: TextPart | ImagePart | VideoPart, mark: Callable[[str], str]) -> dict[str, str]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": mark(part.text)}
    return {"type": "image" if isinstance(part, ImagePart) else "video"}
