"""An adapter's name is a label while it is loaded, and only then."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from decoder_svc.adapter_metrics import AdapterMetrics
from decoder_svc.scheduling.request_output import RequestUsage

USAGE = RequestUsage(prompt_tokens=3, completion_tokens=2)


def requests_of(registry: CollectorRegistry) -> dict[str, float]:
    """Returns the requests by adapter."""
    return {
        sample.labels["adapter"]: sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "lookonce_decoder_adapter_requests_total"
    }


def test_requests_count_for_their_adapter() -> None:
    registry = CollectorRegistry()
    metrics = AdapterMetrics(registry, lambda: ["forms", "bills"])
    assert requests_of(registry) == {"forms": 0, "bills": 0}
    for name in ("forms", "forms", ""):
        metrics.observe(name, USAGE)
    assert requests_of(registry) == {"forms": 2, "bills": 0}
    labels = {"adapter": "forms"}
    assert registry.get_sample_value("lookonce_decoder_adapter_prompt_tokens_total", labels) == 6
    assert registry.get_sample_value("lookonce_decoder_adapter_generated_tokens_total", labels) == 4
    assert registry.get_sample_value("lookonce_decoder_adapters") == 2


def test_names_that_come_and_go_leave_no_series() -> None:
    registry = CollectorRegistry()
    names: list[str] = []
    metrics = AdapterMetrics(registry, lambda: names)
    for number in range(100):
        names[:] = [f"version-{number}"]
        metrics.observe(names[0], USAGE)
        # Its unloading has begun, and its last request ends.
        metrics.observe(f"version-{number - 1}", USAGE)
    assert len(metrics._sums) == 1
    assert requests_of(registry) == {"version-99": 1}
    names.clear()
    assert requests_of(registry) == {}
    assert registry.get_sample_value("lookonce_decoder_adapters") == 0
    names.append("version-99")
    assert requests_of(registry) == {"version-99": 0}
