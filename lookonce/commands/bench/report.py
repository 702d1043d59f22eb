"""The figures of a run: rates, percentiles, and the source of the image rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lookonce.commands.bench.load import Measured

_SHARES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "max": 1.0}


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of all requests of a run. Failed requests count in the first five and in nothing else."""

    num_requests: int
    num_failed: int
    # Number of failures by the kind and message of the error.
    errors: Mapping[str, int]
    # From the first start to the last end, seconds.
    duration_s: float
    # Requests that showed a picture for the first time.
    num_new: int
    # Answers and their tokens per second of that time.
    answers_per_s: float
    completion_tokens_per_s: float
    # Means and percentiles, seconds. Empty if there is no answer. The queue time is that of the decoder.
    latency_s: Mapping[str, float]
    first_text_s: Mapping[str, float]
    queue_s: Mapping[str, float]
    # Tokens of all prompts, and those that the prefix cache had.
    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int
    # Rows of all images by their source, and requests for which any were encoded.
    image_rows: Mapping[str, int]
    num_encoding_requests: int


def report_of(measured: Sequence[Measured]) -> Report:
    """Returns the figures of a run with at least one request."""
    usages = [one.usage for one in measured if one.usage is not None]
    answered = [one for one in measured if one.usage is not None]
    begin_s, end_s = min(one.start_s for one in measured), max(one.start_s + one.latency_s for one in measured)
    duration_s = max(1e-9, end_s - begin_s)
    completion_tokens = sum(usage.completion_tokens for usage in usages)
    encoded, cached, skipped = (
        sum(getattr(usage, f"{source}_image_tokens") for usage in usages) for source in ("encoded", "cached", "skipped")
    )
    return Report(
        num_requests=len(measured),
        num_failed=len(measured) - len(answered),
        errors=dict(Counter(one.error for one in measured if one.error).most_common()),
        duration_s=duration_s,
        num_new=sum(one.is_new for one in measured),
        answers_per_s=len(answered) / duration_s,
        completion_tokens_per_s=completion_tokens / duration_s,
        latency_s=spread([one.latency_s for one in answered]),
        first_text_s=spread([one.first_text_s for one in answered if one.first_text_s is not None]),
        queue_s=spread([usage.queue_time_s for usage in usages]),
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        cached_prompt_tokens=sum(usage.cached_prompt_tokens for usage in usages),
        completion_tokens=completion_tokens,
        image_rows={"encoded": encoded, "cached": cached, "skipped": skipped},
        num_encoding_requests=sum(usage.encoded_image_tokens > 0 for usage in usages),
    )


def spread(values: Sequence[float]) -> dict[str, float]:
    """Returns the mean and the percentiles: each is the smallest value that so large a share does not exceed."""
    if not values:
        return {}
    ordered = sorted(values)
    percentiles = {name: ordered[math.ceil(share * len(ordered)) - 1] for name, share in _SHARES.items()}
    return {"mean": sum(ordered) / len(ordered), **percentiles}


def lines(report: Report) -> list[tuple[str, str]]:
    """Returns the figures for people, each with its name."""
    rows = report.image_rows
    shown = [
        ("requests", f"{report.num_requests}, of which {report.num_failed} failed"),
        ("with a new picture", f"{report.num_new}"),
        ("time", f"{report.duration_s:.2f} s"),
        ("answers", f"{report.answers_per_s:.2f} per second"),
        ("tokens of answers", f"{report.completion_tokens}, {report.completion_tokens_per_s:.1f} per second"),
        ("tokens of prompts", f"{report.prompt_tokens}, of which {report.cached_prompt_tokens} in the prefix cache"),
        ("image rows", f"{rows['encoded']} encoded, {rows['cached']} cached, {rows['skipped']} skipped"),
        ("encodes", f"{report.num_encoding_requests} requests caused one"),
    ]
    named = (("answer", report.latency_s), ("first text", report.first_text_s), ("queue", report.queue_s))
    return shown + [
        (f"{name}, ms", ", ".join(f"{key} {value * 1000:.1f}" for key, value in values.items()) or "-")
        for name, values in named
    ]


def as_object(report: Report, options: Mapping[str, object], measured: Sequence[Measured]) -> dict[str, Any]:
    """Returns everything about a run for JSON: its options, its figures and each request."""
    return {"options": dict(options), "report": asdict(report), "requests": [asdict(one) for one in measured]}
