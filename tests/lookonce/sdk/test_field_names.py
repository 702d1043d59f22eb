"""Errors of decoders have the names of arguments and flags, in the SDK and in the command line."""

from __future__ import annotations

import pytest

from lookonce import AsyncClient, Client
from lookonce.commands.asking.sampling import with_flag
from lookonce.errors import InvalidParameterError, LookonceError, UnsupportedError
from lookonce.sdk.field_names import in_arguments
from lookonce.testing import FakeServer


@pytest.mark.parametrize(
    ("path", "argument", "flag"),
    [
        ("sampling.regex", "regex", "--regex"),
        ("sampling.stop_token_ids", "stop_token_ids", "--stop-token-id"),
        ("sampling.stop[2]", "stop[2]", "--stop[2]"),
        ("chat.tools", "tools", "--tools"),
        ("chat.tools[1].name", "tools[1].name", "--tools[1].name"),
        ("chat.tool_choice.name", "tool_choice.name", "--tool-choice.name"),
        ("chat.messages[3].role", "prompt[3].role", "prompt[3].role"),
        ("tokens.token_ids", "prompt", "prompt"),
    ],
)
def test_a_path_becomes_an_argument_and_a_flag(path: str, argument: str, flag: str) -> None:
    error = in_arguments(InvalidParameterError(path, "is wrong: no"))
    assert isinstance(error, InvalidParameterError)
    assert (error.field, error.description, error.metadata) == (argument, "is wrong: no", {"field": argument})
    assert str(error) == error.message == f"{argument}: is wrong: no"
    assert error.contract_field == path
    assert with_flag(error) == f"{flag}: is wrong: no"


def test_a_second_field_in_the_message_has_its_name_too() -> None:
    error = in_arguments(InvalidParameterError("chat.tools", "cannot be combined with sampling.regex"))
    assert error.message == "tools: cannot be combined with regex"
    assert in_arguments(UnsupportedError("sampling.regex: is not offered")).message == "regex: is not offered"


@pytest.mark.parametrize(
    "error",
    [
        InvalidParameterError("adapter", "'sampling.x' is not served"),
        InvalidParameterError("images[0].max_pixels", "is too small"),
        LookonceError("the engine is down: sampling.regex"),
    ],
)
def test_other_errors_stay(error: LookonceError) -> None:
    message = error.message
    assert in_arguments(error).message == with_flag(error) == message
    assert not error.contract_field


async def test_clients_raise_such_errors() -> None:
    refusal = InvalidParameterError("sampling.regex", "is no regular expression")
    with FakeServer() as server:
        server.fail(*[refusal] * 4)
        with Client.connect(server.target) as client:
            for call in (lambda: client.generate("what"), lambda: [*client.stream("what")]):
                with pytest.raises(InvalidParameterError, match=r"^regex: is no") as caught:
                    call()
                assert caught.value.request_id
        async with AsyncClient.connect(server.target) as asking:
            with pytest.raises(InvalidParameterError, match=r"^regex: is no"):
                await asking.generate("what")
            with pytest.raises(InvalidParameterError, match=r"^regex: is no"):
                [part async for part in asking.stream("what")]
