"""The flags behind -- of `lookonce up` go to the services that have them, and wrong ones end it before it starts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import typer

from lookonce.commands.running.service_flags import service_flags
from lookonce.commands.running.services import Service
from lookonce.errors import ConfigurationError


@pytest.mark.parametrize(
    ("arguments", "encoder", "decoder"),
    [
        ([], [], []),
        (["--max-num-seqs", "8"], [], ["--max-num-seqs", "8"]),
        (["--row-format=int8"], ["--row-format=int8"], []),
        (
            ["--num-threads", "2", "--no-prefix-cache"],
            ["--num-threads", "2"],
            ["--num-threads", "2", "--no-prefix-cache"],
        ),
        (
            ["--deterministic", "--max-batch-items", "9"],
            ["--deterministic", "--max-batch-items", "9"],
            ["--deterministic"],
        ),
    ],
)
def test_a_flag_goes_to_each_service_that_has_it(
    arguments: Sequence[str], encoder: Sequence[str], decoder: Sequence[str]
) -> None:
    assert service_flags(arguments, ".") == {Service.ENCODER: encoder, Service.DECODER: decoder}


def test_addresses_of_the_environment_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOKONCE_LISTEN", "0.0.0.0:1")
    assert service_flags(["--ttl-s", "9"], ".")[Service.DECODER] == ["--ttl-s", "9"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["8"], "'8' is no flag"),
        (["--max-num-seq", "8"], "did you mean --max-num-seqs?"),
        (["--decoder-target", "x:1"], "there is no flag --decoder-target"),
        (["--listen", "127.0.0.1:1"], "`up` chooses --listen itself"),
        (["--redis-url=redis://:SECRET@x"], "`up` chooses --redis-url itself"),
    ],
)
def test_what_is_no_flag_for_them_is_refused(arguments: list[str], words: str) -> None:
    with pytest.raises(typer.BadParameter) as caught:
        service_flags(arguments, ".")
    assert words in caught.value.message
    assert "SECRET" not in caught.value.message


@pytest.mark.parametrize(
    "arguments", [["--max-num-seqs", "0"], ["--ttl-s", "long"], ["--ttl-s"], ["--num-threads", "1025"]]
)
def test_what_a_service_would_refuse_is_refused(arguments: list[str]) -> None:
    with pytest.raises(ConfigurationError, match=arguments[0]):
        service_flags(arguments, ".")
