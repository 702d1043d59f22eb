"""Tests that the metrics table is that of the code. tests/e2e/test_metrics.py compares it with running services."""

from __future__ import annotations

import pytest

from docs.generate_metrics import PAGE, SERVICES, MetricRow, Service, all_metrics, page_with_metrics, service_metrics


def test_the_committed_page_is_current() -> None:
    page = PAGE.read_text("utf-8")
    assert page_with_metrics(page) == page, "run `make docs`"


@pytest.mark.parametrize("service", SERVICES)
def test_every_metric_is_described_once_and_says_whose_it_is(service: Service) -> None:
    page = PAGE.read_text("utf-8")
    for row in service_metrics(service):
        assert row.meaning.endswith("."), row
        assert page.count(f"| `{row.name}` |") == 1
    (other,) = set(SERVICES) - {service}
    assert not [row for row in service_metrics(service) if row.name.startswith(f"lookonce_{other}_")]


def test_metrics_of_only_one_service_carry_its_name() -> None:
    encoder, decoder = (set(service_metrics(service)) for service in SERVICES)
    assert encoder & decoder
    for service, rows in zip(SERVICES, (encoder - decoder, decoder - encoder), strict=True):
        assert {row.name.startswith(f"lookonce_{service}_") for row in rows} == {True}


def test_labels_of_metrics_and_of_collectors_without_samples_are_told() -> None:
    rows = {row.name: row for row in all_metrics()}
    assert rows["lookonce_grpc_requests_total"].labels == ("method", "code")
    assert rows["lookonce_decoder_embedding_fetch_seconds"].labels == ("tier",)
    assert rows["lookonce_encoder_cache_miss_total"].labels == ("operation", "reason")
    assert rows["lookonce_decoder_running_requests"].labels == ()


def test_a_histogram_is_stored_under_three_names() -> None:
    row = MetricRow("lookonce_some_seconds", "histogram", (), "Time.")
    assert row.series == {"lookonce_some_seconds_bucket", "lookonce_some_seconds_sum", "lookonce_some_seconds_count"}
    assert MetricRow("lookonce_some_total", "counter", (), "Sum.").series == {"lookonce_some_total"}


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="lacks the marks"):
        page_with_metrics("# Operations\n")
