"""Metrics count every request that ended, and show the engine's figures at the time of the scrape."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from decoder_svc.engine.core import EngineFacts
from decoder_svc.engine.figures import EngineCounters, EngineLimits, EngineLoad
from decoder_svc.metrics import DecoderMetrics
from decoder_svc.scheduling.request_output import RequestUsage

USAGE = RequestUsage(
    prompt_tokens=3,
    image_tokens=18,
    encoded_image_tokens=2,
    cached_image_tokens=7,
    skipped_image_tokens=9,
    completion_tokens=2,
    queue_time_s=0.5,
    time_to_first_token_s=101.0,
)


def test_requests_that_ended_are_summed_up() -> None:
    registry = CollectorRegistry()
    metrics = DecoderMetrics(registry)
    for _ in range(2):
        metrics.observe(USAGE)
    expected = {
        ("lookonce_decoder_prompt_tokens_total", ""): 6,
        ("lookonce_decoder_generated_tokens_total", ""): 4,
        ("lookonce_decoder_image_rows_total", "encoded"): 4,
        ("lookonce_decoder_image_rows_total", "shared"): 14,
        ("lookonce_decoder_image_rows_total", "skipped"): 18,
    }
    for (name, tier), value in expected.items():
        assert registry.get_sample_value(name, {"tier": tier} if tier else {}) == value, name
    assert registry.get_sample_value("lookonce_decoder_ttft_seconds_bucket", {"le": "60.0"}) == 0
    assert registry.get_sample_value("lookonce_decoder_ttft_seconds_count") == 2
    assert registry.get_sample_value("lookonce_decoder_queue_seconds_bucket", {"le": "0.5"}) == 2


def test_a_request_without_a_token_has_no_latency() -> None:
    registry = CollectorRegistry()
    DecoderMetrics(registry).observe(RequestUsage(prompt_tokens=3))
    assert registry.get_sample_value("lookonce_decoder_prompt_tokens_total") == 3
    assert registry.get_sample_value("lookonce_decoder_ttft_seconds_count") == 0
    assert registry.get_sample_value("lookonce_decoder_queue_seconds_count") == 0


def test_the_engine_is_asked_at_every_scrape() -> None:
    registry = CollectorRegistry()
    loads = [EngineLoad(2, 1, 1, 0.25, 32)]
    counters = EngineCounters(3, 40, 30, 20, 10, 1, 4)
    facts = EngineFacts(EngineLimits(100, 16, 8, 32, 8, 64, 64, 16), "native", 5000)
    DecoderMetrics(registry).watch(lambda: loads[-1], lambda: counters, facts)
    expected = {
        "lookonce_decoder_running_requests": 2,
        "lookonce_decoder_waiting_requests": 1,
        "lookonce_decoder_requests_waiting_for_rows": 1,
        "lookonce_decoder_kv_cache_usage": 0.25,
        "lookonce_decoder_encoder_cache_rows": 32,
        "lookonce_decoder_preemptions_total": 3,
        "lookonce_decoder_prefix_cache_query_tokens_total": 40,
        "lookonce_decoder_prefix_cache_hit_tokens_total": 30,
        "lookonce_decoder_draft_tokens_total": 20,
        "lookonce_decoder_accepted_draft_tokens_total": 10,
        "lookonce_decoder_stalls_total": 1,
        "lookonce_decoder_memory_errors_total": 4,
        "lookonce_decoder_weight_bytes": 5000,
    }
    for name, value in expected.items():
        assert registry.get_sample_value(name) == value, name
    assert registry.get_sample_value("lookonce_decoder_attention_backend_info", {"backend": "native"}) == 1
    loads.append(EngineLoad(5, 0, 0, 0.5, 0))
    assert registry.get_sample_value("lookonce_decoder_running_requests") == 5
