"""Reports which implementation of each operation a service uses, in its log and its metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from lookonce.logs import get_logger
from lookonce.model.kernels.kernel_choice import KernelChoice

_log = get_logger(__name__)


def report_kernels(registry: CollectorRegistry, choices: Sequence[KernelChoice]) -> None:
    """Logs the choices of the process that has loaded the model, and exports them."""
    for choice in choices:
        _log.info(
            "kernel chosen",
            operation=choice.operation,
            implementation=choice.implementation,
            milliseconds={name: round(value * 1e3, 3) for name, value in choice.seconds.items()},
        )
    registry.register(KernelCollector(choices))


class KernelCollector(Collector):
    """The choices for a model, and how much faster than PyTorch's the implementation in use was."""

    def __init__(self, choices: Sequence[KernelChoice]) -> None:
        self._choices = choices

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yields one gauge with a sample per operation."""
        ratios = GaugeMetricFamily(
            "lookonce_kernel_speed_ratio",
            "Time of PyTorch's implementation on this CPU over that of the one in use, in the trial at start-up.",
            labels=["operation", "implementation"],
        )
        for choice in self._choices:
            ratios.add_metric([choice.operation, choice.implementation], choice.speed_ratio)
        yield ratios
