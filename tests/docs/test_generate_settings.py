"""The settings tables of the documentation are those of the code."""

from __future__ import annotations

import pytest

from decoder_svc.settings import DecoderSettings
from docs.generate_settings import PAGE, page_with_settings
from encoder_svc.settings import EncoderSettings


def test_the_committed_page_is_current() -> None:
    page = PAGE.read_text("utf-8")
    assert page_with_settings(page) == page, "run `make docs`"


@pytest.mark.parametrize("settings_class", [EncoderSettings, DecoderSettings])
def test_every_setting_is_described(settings_class: type[EncoderSettings | DecoderSettings]) -> None:
    page = PAGE.read_text("utf-8")
    for name, field in settings_class.model_fields.items():
        assert field.description
        assert page.count(f"| `{name}` |") == 1


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="lacks the marks"):
        page_with_settings("# Operations\n")
