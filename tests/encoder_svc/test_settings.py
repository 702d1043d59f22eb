"""Settings that contradict each other are refused, and the error names them."""

from __future__ import annotations

import pathlib

import pytest

from encoder_svc.settings import EncoderSettings
from encoder_svc.vision.vision_config import VisionConfig
from lookonce.errors import ConfigurationError
from lookonce.process.process_clock import TimeLimits
from lookonce.server.settings_parser import parse_settings


def parsed(*arguments: str) -> EncoderSettings:
    """Settings parsed from command-line flags."""
    return parse_settings(EncoderSettings, ["--model", "somewhere", *arguments], "encoder_svc")


def test_the_defaults_fit_together() -> None:
    settings = parsed()
    assert settings.max_batch_items <= settings.max_queued_images
    assert settings.max_entry_bytes > settings.max_image_bytes


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--max-batch-items", "9", "--max-queued-images", "8"], ["max_batch_items=9", "max_queued_images=8"]),
        (
            ["--max-queued-bytes", "2000000", "--max-message-bytes", "3000000"],
            ["max_queued_bytes=2000000", "max_message_bytes=3000000"],
        ),
        (["--local-cache-bytes", "0"], ["redis_url", "local_cache_bytes"]),
        (
            ["--encode-lease-s", "0.2", "--redis-url", "redis://localhost"],
            ["encode_lease_s=0.2 must be at least redis_budget_s=0.25"],
        ),
        (["--max-image-aspect", "300"], ["--max-image-aspect", "200"]),
        (["--max-forward-images", "0"], ["--max-forward-images"]),
    ],
)
def test_a_contradiction_names_its_fields(arguments: list[str], parts: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parsed(*arguments)
    for part in parts:
        assert part in caught.value.message


def test_rows_may_live_in_redis_alone() -> None:
    assert parsed("--local-cache-bytes", "0", "--redis-url", "redis://localhost").local_cache_bytes == 0


def test_the_vision_model_gets_all_settings_that_decide_its_rows() -> None:
    settings = parsed("--device", "cpu", "--dtype", "bfloat16", "--row-format", "int8")
    expected = VisionConfig(pathlib.Path("somewhere"), device="cpu", dtype="bfloat16", row_format="int8")
    assert settings.vision == expected
    assert parsed().vision == VisionConfig(pathlib.Path("somewhere"))


def test_a_starved_decoding_ends_after_its_own_limit() -> None:
    assert parsed().decode_time_limits == TimeLimits(cpu_s=10.0, wall_s=60.0)
    assert parsed("--decode-timeout-s", "20").decode_time_limits.wall_s == 120.0
    assert parsed("--decode-wall-timeout-s", "15").decode_time_limits == TimeLimits(cpu_s=10.0, wall_s=15.0)
    with pytest.raises(ConfigurationError, match="decode_wall_timeout_s=5 must be at least decode_timeout_s=10"):
        parsed("--decode-wall-timeout-s", "5")
