"""Running services export exactly the metrics of the documentation's table: names, types, labels and help."""

from __future__ import annotations

import urllib.request

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from docs.generate_metrics import SERVICES, MetricRow, Service, service_metrics
from lookonce.aio import AsyncClient
from lookonce.local.local_stack import LocalStack
from tests.e2e.pictures import QUESTION, fresh

# The Prometheus client adds metrics of the process, and of when a counter began; they are not in the table.
_PROCESS = "process_"
_CREATED = "_created"


def exported(stack: LocalStack, service: Service) -> list[Metric]:
    """Our metric families, as the first process of that service exports them."""
    process = {"encoder": stack.encoders, "decoder": stack.decoders}[service][0]
    with urllib.request.urlopen(f"http://127.0.0.1:{process.ready.metrics_port}/metrics", timeout=10) as response:
        families = text_string_to_metric_families(response.read().decode())
        return [one for one in families if not one.name.startswith(_PROCESS) and not one.name.endswith(_CREATED)]


def as_row(family: Metric, labels: tuple[str, ...]) -> MetricRow:
    """A family as the table would say it."""
    name = f"{family.name}_total" if family.type == "counter" else family.name
    return MetricRow(name, family.type, labels, family.documentation)


@pytest.mark.parametrize("service", SERVICES)
async def test_the_table_lists_exactly_the_metrics_of_running_services(stack: LocalStack, service: Service) -> None:
    (picture,) = fresh(1)
    async with AsyncClient.connect(stack.decoder_targets[0]) as client:
        assert (await client.generate(QUESTION, images=[picture.data], max_tokens=16)).text == picture.answer
    told = {row.name: row for row in service_metrics(service)}
    families = exported(stack, service)
    rows = [as_row(family, ()) for family in families]
    assert sorted(row.name for row in rows) == sorted(told)
    for row, family in zip(rows, families, strict=True):
        assert as_row(family, told[row.name].labels) == told[row.name]
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(told[row.name].labels), sample
    assert sum(bool(family.samples) for family in families) > len(families) / 2
