"""Prompts that begin alike have one affinity."""

from __future__ import annotations

from lookonce import ImageRef, Message, TextPrompt, Video
from lookonce.content_key import image_digest
from lookonce.generation import Prompt
from lookonce.images import ImageLike
from lookonce.sdk.messages import PreparedPrompt

CAT, DOG = b"a cat", b"a dog"


def affinity(prompt: Prompt, images: list[ImageLike] | None = None) -> bytes:
    return PreparedPrompt(prompt, images or [], {}).affinity


def test_it_is_that_of_the_first_image_whatever_the_text() -> None:
    expected = bytes(image_digest(CAT))[:16]
    assert affinity("What is it?", [CAT, DOG]) == expected
    assert affinity("Where is it?", [ImageRef.from_digest(image_digest(CAT))]) == expected
    turns = [Message("system", "Be short."), Message("user", ["Look:", ImageRef.from_bytes(CAT), "What is it?"])]
    assert affinity(turns) == expected
    assert affinity([*turns, Message("assistant", "A cat."), Message("user", [DOG, "And this?"])]) == expected
    video = Video.from_frames([ImageRef.from_bytes(CAT), ImageRef.from_bytes(DOG)])
    assert affinity([Message("user", [video, "What happens?"])]) == expected
    assert affinity("What is it?", [DOG, CAT]) != expected


def test_without_images_it_is_that_of_the_text_up_to_the_first_question() -> None:
    turns = [Message("system", "Be short."), Message("user", "Who are you?")]
    later = [*turns, Message("assistant", "A decoder."), Message("user", "Since when?")]
    assert affinity(turns) == affinity(later)
    assert affinity(turns) != affinity([turns[0], Message("user", "Where are you?")])
    assert affinity("Who are you?") == affinity([Message("user", "Who are you?")])
    assert affinity(TextPrompt("Once upon")) == affinity("Once upon")


def test_long_texts_that_differ_at_their_ends_are_alike() -> None:
    document = "word " * 1000
    assert affinity(document + "Who?") == affinity(document + "Where?")
    assert affinity([Message("user", [document, "Who?"])]) == affinity([Message("user", [document, "Where?"])])
    assert affinity("x" + document) != affinity(document)


def test_text_that_is_no_unicode_is_left_to_the_check_of_the_prompt() -> None:
    assert len(affinity("\ud800")) == 16
