"""Renders a conversation with the model's own chat template, and says which of the text the template wrote.

The messages are data: nothing in them is run as template code, and what a user wrote stays marked as a user's, however
the template moves it about. Tokenizes nothing.
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
# So many digits of a mark's beginning or end show that it was there.
_FRAGMENT_DIGITS = 10
_OPEN, _CLOSE, _WHOLE = "1", "2", "3"


class ChatTemplate:
    """The chat template of one model folder; safe to use from several threads at once."""

    def __init__(self, pretrained: Any, source: str, image_token: str, video_text: str | None = None) -> None:
        """`pretrained` is the folder's tokenizer in transformers, `source` the Jinja text.

        `video_text` stands for one video; None: there are none. Raises ModelFolderError when the template does not
        write `image_token` once for one image.
        """
        self._pretrained = pretrained
        self._source = source
        self._check_image_placement(image_token)
        # Whether the template knows videos.
        self.takes_videos = video_text is not None and self._writes_videos(video_text)

    @classmethod
    def load(
        cls, folder: pathlib.Path, pretrained: Any, image_token: str, video_text: str | None = None
    ) -> ChatTemplate | None:
        """The folder's template (chat_template.jinja, chat_template.json, tokenizer_config.json), None without one."""
        source = chat_template_source(folder, pretrained.chat_template)
        return None if source is None else cls(pretrained, source, image_token, video_text)

    def render(self, messages: Sequence[ChatMessage]) -> list[TextPiece]:
        """The conversation up to where the assistant's answer begins.

        Raises PromptEmptyError without messages and InvalidParameterError for a conversation that the template refuses
        or that ends with the assistant's turn.
        """
        if not messages:
            raise PromptEmptyError("chat.messages is empty; send at least one message")
        if messages[-1].role is ChatRole.ASSISTANT:
            raise InvalidParameterError(
                "chat.messages", "the last message is the assistant's; continuing it is not offered, end with a user's"
            )
        marks = _Marks()
        pieces = marks.bordered_pieces(self._rendered(messages, marks.bordered))
        if pieces is not None:
            return pieces
        # The template cut a text in two (it drops a thinking passage, say). Then it gets to see no text at all.
        marks = _Marks()
        return marks.whole_pieces(self._rendered(messages, marks.whole))

    def _rendered(self, messages: Sequence[ChatMessage], mark: Callable[[str], str]) -> str:
        try:
            try:
                return self._apply([_in_parts(message, mark) for message in messages])
            except TypeError:
                # Some templates take what is not a user's for strings (Pixtral's does).
                return self._apply([_in_text(message, mark) for message in messages])
        except TEMPLATE_ERRORS as error:
            # The class itself: the template's author speaks. Another: Jinja or Python does, and its words stay here.
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
        """Whether it writes the text once for one video, rather than nothing or a refusal."""
        try:
            return self._num_written("video", text) == 1
        except TEMPLATE_ERRORS:
            return False

    def _num_written(self, part_type: str, text: str) -> int:
        """How often the template writes this text for one part of this type. Raises one of TEMPLATE_ERRORS."""
        return self._apply([{"role": "user", "content": [{"type": part_type}, {"type": "text", "text": "?"}]}]).count(
            text
        )


class _Mark(NamedTuple):
    """One mark in a rendered string, [start, stop)."""

    start: int
    stop: int
    # Digits that number the text, and which of its marks this is.
    number: str
    kind: str


class _Marks:
    """Marks around the texts of one conversation, by which they are found again in the rendered string."""

    def __init__(self) -> None:
        self._nonce = str(secrets.randbelow(9 * 10 ** (_NONCE_DIGITS - 1)) + 10 ** (_NONCE_DIGITS - 1))
        self._texts: list[str] = []

    def bordered(self, text: str) -> str:
        """The text with a mark before its first and after its last visible character: stripping still works."""
        return self._marked(text, lambda index, core: f"{self._nonce}{index}{_OPEN}{core}{self._nonce}{index}{_CLOSE}")

    def whole(self, text: str) -> str:
        """The text with a mark in place of everything between its first and its last visible character."""
        return self._marked(text, lambda index, core: f"{self._nonce}{index}{_WHOLE}")

    def bordered_pieces(self, rendered: str) -> list[TextPiece] | None:
        """Pieces of a string that was rendered from bordered texts; None when a text lost one of its two marks."""
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
        """Pieces of a string that was rendered from marks in place of texts.

        Raises InvalidParameterError when the template left a part of a mark only.
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
        """All marks, in order. Not by a regular expression: compiling one for each conversation cost a third of it."""
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
    """Where the message is not a user's and has nothing but text."""
    texts = [mark(part.text) for part in message.parts if isinstance(part, TextPart)]
    if message.role is ChatRole.USER or len(texts) < len(message.parts):
        return _in_parts(message, mark)
    return {"role": message.role.value, "content": "".join(texts)}


def _template_part(part: TextPart | ImagePart | VideoPart, mark: Callable[[str], str]) -> dict[str, str]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": mark(part.text)}
    return {"type": "image" if isinstance(part, ImagePart) else "video"}
