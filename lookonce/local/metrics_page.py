"""Reads the page that a service shows to Prometheus. Its text format is simple enough to need no library."""

from __future__ import annotations

import http.client
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

from lookonce.errors import UnavailableError

# A name, labels if there are any, and a value. Label values of Lookonce's metrics contain no quotes and no braces.
_SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>[^}]*)\})? (?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_MAX_PAGE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class MetricSample:
    """One line of the page."""

    name: str
    labels: Mapping[str, str]
    value: float


class MetricsPage:
    """The samples of a page."""

    def __init__(self, text: str) -> None:
        """Lines that are no samples are left out."""
        found = (_SAMPLE.match(line) for line in text.splitlines() if not line.startswith("#"))
        self._samples = [
            MetricSample(match["name"], dict(_LABEL.findall(match["labels"] or "")), float(match["value"]))
            for match in found
            if match is not None
        ]

    def has(self, prefix: str) -> bool:
        """Whether the name of any sample begins with `prefix`."""
        return any(sample.name.startswith(prefix) for sample in self._samples)

    def total(self, name: str, **labels: str) -> float:
        """Returns the sum of a metric over all labels but those that are given; 0 if there is none."""
        return sum(
            sample.value for sample in self._samples if sample.name == name and labels.items() <= sample.labels.items()
        )


def read_metrics(address: str, timeout_s: float = 5.0) -> MetricsPage:
    """Fetches the page of host:port. Raises UnavailableError if there is none. Uses no proxy of the environment."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{address}/metrics", timeout=timeout_s) as response:
            text = response.read(_MAX_PAGE_BYTES).decode("utf-8", "replace")
    except urllib.error.URLError as error:
        reason = error.reason.strerror if isinstance(error.reason, OSError) else error.reason
        raise UnavailableError(f"no metrics at {address}: {reason or error}") from None
    except http.client.HTTPException:
        # The text of such an error is what the server sent.
        raise UnavailableError(f"no metrics at {address}: its answer is not HTTP") from None
    except (OSError, ValueError) as error:
        raise UnavailableError(f"no metrics at {address}: {error}") from None
    return MetricsPage(text)
