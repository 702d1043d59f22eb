"""The tree drawn in errors.py is the tree of classes, and every error has a place in it."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import pytest

from lookonce import errors


def _classes() -> dict[str, type[errors.LookonceError]]:
    return {
        name: value
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.LookonceError)
    }


def _drawn_parents() -> dict[str, str]:
    """Returns the parent of each class, from the indentation of the module's docstring."""
    parents: dict[str, str] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"([│├└─ ]*)(\w+Error)\b", line)
        if found is None:
            continue
        depth = len(found[1]) // 4
        path = [*path[:depth], found[2]]
        if depth:
            parents[found[2]] = path[depth - 1]
    return parents


def test_the_drawn_tree_is_the_tree_of_classes() -> None:
    actual = {name: kind.__mro__[1].__name__ for name, kind in _classes().items() if kind is not errors.LookonceError}
    assert _drawn_parents() == actual


def test_every_error_has_its_message_as_text() -> None:
    assert str(errors.UnavailableError("try again")) == "try again"
    assert errors.UnavailableError("try again").message == "try again"


def test_an_error_keeps_a_copy_of_its_metadata() -> None:
    given = {"limit": "5"}
    error = errors.InvalidInputError("too many", metadata=given)
    given["limit"] = "6"
    assert error.metadata == {"limit": "5"}


def test_an_invalid_parameter_names_its_field_in_message_and_metadata() -> None:
    error = errors.InvalidParameterError("sampling.top_p", "must be in (0, 1], not 7")
    assert error.message == "sampling.top_p: must be in (0, 1], not 7"
    assert error.metadata == {"field": "sampling.top_p"}


def test_missing_images_are_listed_in_the_metadata() -> None:
    assert errors.EmbeddingNotCachedError("not cached", indexes=[0, 3]).metadata == {"indexes": "0,3"}
    assert errors.EmbeddingNotCachedError("not cached").indexes == ()


def test_an_error_in_an_image_gets_the_images_position() -> None:
    with pytest.raises(errors.ImageTooLargeError) as caught, errors.located_in_image(2):
        raise errors.ImageTooLargeError("too large")
    assert caught.value.metadata == {"index": "2"}


def test_an_error_that_is_not_the_images_fault_gets_no_position() -> None:
    with pytest.raises(errors.UnavailableError) as caught, errors.located_in_image(2):
        raise errors.UnavailableError("away")
    assert caught.value.metadata == {}


def _examples() -> list[errors.LookonceError]:
    """One error of each class, each with a metadata entry of its own."""
    special = {
        errors.InvalidParameterError: lambda: errors.InvalidParameterError("top_p", "must be in (0, 1], not 7"),
        errors.EmbeddingNotCachedError: lambda: errors.EmbeddingNotCachedError("not cached", indexes=[0, 3]),
        errors.OverloadedError: lambda: errors.OverloadedError("full", retry_after_s=2.5),
    }
    made = [special.get(kind, lambda kind=kind: kind("a fault"))() for kind in _classes().values()]
    for error in made:
        error.metadata["index"] = "2"
        error.add_note("seen in a worker")
    return made


def _raise(error: errors.LookonceError) -> None:
    raise error


def _assert_same(found: BaseException | None, error: errors.LookonceError) -> None:
    assert type(found) is type(error)
    assert (str(found), found.args, vars(found)) == (str(error), error.args, vars(error))


def _unpickled(error: errors.LookonceError) -> object:
    return pickle.loads(pickle.dumps(error))  # noqa: S301


@pytest.mark.parametrize("duplicate", [_unpickled, copy.copy, copy.deepcopy])
@pytest.mark.parametrize("error", _examples(), ids=lambda error: type(error).__name__)
def test_an_error_survives_pickling_and_copying(
    error: errors.LookonceError, duplicate: Callable[[errors.LookonceError], errors.LookonceError]
) -> None:
    _assert_same(duplicate(error), error)


def test_errors_come_back_from_another_process() -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        for error in _examples():
            found = pool.submit(_raise, error).exception(timeout=60)
            # The pool names the other process's traceback as the cause, and adds nothing else.
            _assert_same(found, error)


def test_names_from_a_models_files_reach_no_terminal_as_they_are() -> None:
    error = errors.ModelFolderError(f"the weights \x1b[2J\n{'x' * 10_000}\u202e are wrong; download them again")
    assert error.message.startswith("the weights \\x1b[2J\\nxxx")
    assert error.message.endswith("xxx\\u202e are wrong; download them again")
    assert len(error.message) < 2100
    assert error.message.isprintable()
    assert errors.ModelFolderError("Größe „8“ ist falsch").message == "Größe „8“ ist falsch"
