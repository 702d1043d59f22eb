"""Messages about images to forget survive the way over the channel, and malformed ones forget everything."""

from __future__ import annotations

import pytest

from lookonce.forgotten import EVERYTHING, TOKEN_BYTES, Forgotten, new_token, parse_message, to_message
from tests.lookonce.store.entries import fresh_key


def test_a_message_carries_its_token_and_images() -> None:
    token, some = new_token(), Forgotten.of([fresh_key() for _ in range(256)])
    assert parse_message(to_message(token, some)) == (token, some)
    assert parse_message(to_message(token, EVERYTHING)) == (token, EVERYTHING)


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"short",
        b"t" * TOKEN_BYTES,
        b"t" * TOKEN_BYTES + b"k" * 31,
        b"t" * TOKEN_BYTES + b"k" * 33,
        b"t" * TOKEN_BYTES + b"k" * 32 * 257,
    ],
)
def test_a_malformed_message_means_every_image(message: bytes) -> None:
    assert parse_message(message) == (message[:TOKEN_BYTES], EVERYTHING)


def test_a_set_includes_its_images_and_no_others() -> None:
    key, other = fresh_key(), fresh_key()
    some = Forgotten.of([key])
    assert (some.includes(key.value), some.includes(other.value)) == (True, False)
    assert EVERYTHING.includes(other.value)


def test_a_union_includes_the_members_of_either() -> None:
    key, other = fresh_key(), fresh_key()
    both = Forgotten.of([key]).and_also(Forgotten.of([other]))
    assert both == Forgotten.of([other, key])
    assert both.and_also(EVERYTHING) == EVERYTHING.and_also(both) == EVERYTHING


def test_tokens_differ_and_have_the_length_that_readers_expect() -> None:
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert {len(token) for token in tokens} == {TOKEN_BYTES}
