"""Tests that the settings page of the documentation lists exactly the settings of the code."""

from __future__ import annotations

import pytest

from decoder_svc.settings import DecoderSettings, RankSettings
from docs.generate_settings import PAGE, settings_page
from encoder_svc.settings import EncoderSettings
from gateway_svc.settings import GatewaySettings
from lookonce.server.settings import EnvironmentSettings


def test_the_committed_page_is_current() -> None:
    assert PAGE.read_text("utf-8") == settings_page(), "run `make docs`"


@pytest.mark.parametrize("settings_class", [EncoderSettings, DecoderSettings, RankSettings, GatewaySettings])
def test_every_setting_is_described(settings_class: type[EnvironmentSettings]) -> None:
    services, _, rest = PAGE.read_text("utf-8").partition("## Rank of a split model")
    rank, _, gateway = rest.partition("## Gateway")
    page = {RankSettings: rank, GatewaySettings: gateway}.get(settings_class, services)
    for name, field in settings_class.model_fields.items():
        assert field.description
        assert page.count(f"| `{name}` |") == 1


def test_the_page_tells_editors_that_it_is_generated() -> None:
    assert "make docs" in settings_page().splitlines()[0]


def test_sizes_have_units_and_choices_are_listed() -> None:
    rows = {
        line.split("|")[1].strip(" `"): line
        for line in reversed(settings_page().splitlines())
        if line.startswith("| `")
    }
    assert "| 32 MiB | ≥ 1 MiB, ≤ 2047 MiB |" in rows["max_message_bytes"]
    assert "| `native` | `native`, `int8` |" in rows["row_format"]
    assert "| required |" in rows["model"]
