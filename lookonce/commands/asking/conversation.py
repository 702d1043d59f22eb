"""The state of one chat: its turns, and the pictures that the next turn will show. Prints nothing, calls no server."""

from __future__ import annotations

from collections.abc import Sequence

from lookonce.generation import Message, Part
from lookonce.images import ImageRef


class Conversation:
    """A chat with a model. A question becomes a turn only when it has been answered."""

    def __init__(self, system: str | None, images: Sequence[ImageRef]) -> None:
        """`images` are shown with the first question."""
        self.system = system
        self.images = list(images)
        self._turns: list[Message] = []

    @property
    def num_turns(self) -> int:
        """Number of questions that were answered."""
        return len(self._turns) // 2

    def question(self, text: str) -> list[Message]:
        """Returns the chat with this question at its end. The pictures that wait come before the text."""
        parts: list[Part] = [*self.images, text]
        instructions = [Message("system", self.system)] if self.system else []
        return [*instructions, *self._turns, Message("user", parts)]

    def keep(self, messages: Sequence[Message], answer: str) -> None:
        """Adds the question at the end of `messages`, and its answer. The pictures of the question wait no longer."""
        self._turns += [messages[-1], Message("assistant", answer)]
        self.images.clear()

    def undo(self) -> bool:
        """Forgets the last question and its answer. Returns False if there is none."""
        is_any = bool(self._turns)
        del self._turns[-2:]
        return is_any

    def clear(self) -> None:
        """Forgets all turns and the pictures that wait. The system prompt stays."""
        self._turns.clear()
        self.images.clear()

    def lines(self) -> list[str]:
        """Returns the chat for people: a line or more for each message, a picture as the beginning of its digest."""
        spoken = [Message("system", self.system)] if self.system else []
        return [f"{message.role}: {_shown(message)}" for message in [*spoken, *self._turns]]


def _shown(message: Message) -> str:
    if isinstance(message.content, str):
        return message.content
    return " ".join(
        f"[picture {part.hex[:16]}]" if isinstance(part, ImageRef) else str(part) for part in message.content
    )
