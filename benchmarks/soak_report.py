"""The plan of a soak, what it saw, and its report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks import report
from benchmarks.frozen_redis import quantile
from benchmarks.soak_fleet import Memory
from benchmarks.soak_load import HUNG, RIGHT, WRONG, Call, Recorder

CALM, ABUSE, FAULT, BETWEEN = "calm", "under abuses", "under faults", "between them"
_STORM = "all but calm"
# Calls of the control client that take longer are listed one by one, seconds.
_SLOW_S = 0.1


@dataclass(frozen=True, slots=True)
class Plan:
    """The size of a soak."""

    duration_s: float
    calm_s: float
    seed: int
    # Encoders, and decoders.
    num_each: int = 2
    interval_s: float = 5.0
    control_interval_s: float = 0.5
    num_loops: int = 3
    num_asks: int = 300
    # A fault or an abuse counts for so long after its end.
    echo_s: float = 2.0
    # Share of the full size of abuses.
    abuse_scale: float = 1.0
    # Whether processes are killed and replaced.
    replaces: bool = True


@dataclass(frozen=True, slots=True)
class Window:
    """The time in which something was done to the fleet, seconds of the monotonic clock."""

    name: str
    is_abuse: bool
    begin_s: float
    end_s: float
    # Number of an abuse's calls by status; "done" for a fault; else the error of the attempt.
    outcome: dict[str, int]


@dataclass(slots=True)
class Found:
    """Everything that a soak saw."""

    recorder: Recorder = field(default_factory=Recorder)
    windows: list[Window] = field(default_factory=list)
    # Begin and end of the phase of faults.
    faults_s: tuple[float, float] = (0.0, 0.0)
    # At the ends of both calm phases.
    memory: list[list[Memory]] = field(default_factory=list)
    # After each stretch of faults, and of abuses.
    stretches: list[list[Memory]] = field(default_factory=list)
    num_encodes: int = 0
    ended_by_themselves: list[str] = field(default_factory=list)

    def windows_of(self, call: Call) -> list[Window]:
        """Returns what was done to the fleet during the call, or shortly before."""
        return [one for one in self.windows if call.sent_s < one.end_s and call.ended_s > one.begin_s]

    def kind(self, call: Call) -> str:
        """Returns the kind of time in which the call ran. A fault beside an abuse makes it one under faults."""
        hit = {one.is_abuse for one in self.windows_of(call)}
        if hit:
            return FAULT if False in hit else ABUSE
        begin_s, end_s = self.faults_s
        return BETWEEN if begin_s <= call.sent_s < end_s else CALM


def figures_of(plan: Plan, found: Found) -> dict[str, object]:
    """Returns all figures, for JSON and for the section."""
    calls = found.recorder.calls
    kinds = {kind: [call for call in calls if found.kind(call) == kind] for kind in (CALM, ABUSE, FAULT, BETWEEN)}
    timed = {**kinds, _STORM: [call for kind, some in kinds.items() if kind != CALM for call in some]}
    pictures = found.recorder.pictures
    return {
        "plan": asdict(plan),
        "outcomes": {
            client: {
                kind: dict(Counter(call.outcome for call in some if call.client == client))
                for kind, some in kinds.items()
            }
            for client in ("control", "working")
        },
        "control_s": {
            kind: _times(
                call.ended_s - call.sent_s for call in some if (call.client, call.outcome) == ("control", RIGHT)
            )
            for kind, some in timed.items()
        },
        "slowest_control_s": _slowest(found),
        "slow_control_calls": [
            {"seconds": call.ended_s - call.sent_s, "during": [one.name for one in found.windows_of(call)]}
            for call in calls
            if call.client == "control" and call.ended_s - call.sent_s > _SLOW_S
        ],
        "memory": _lasting(*found.memory),
        "all_memory": [[asdict(one) for one in phase] for phase in found.memory],
        "stretches": [[asdict(one) for one in phase] for phase in found.stretches],
        "control_failures": [
            {"outcome": call.outcome, "during": [one.name for one in found.windows_of(call)]}
            for call in calls
            if call.client == "control" and call.outcome != RIGHT
        ],
        "num_windows": len(found.windows),
        "num_encodes": found.num_encodes,
        "num_pictures": sum(map(len, pictures.values())),
        "faults": {
            name: dict(sum((Counter(one.outcome) for one in found.windows if one.name == name), Counter()))
            for name in sorted({one.name for one in found.windows})
        },
        "ended_by_themselves": found.ended_by_themselves,
        "notes": found.recorder.notes,
    }


def _times(seconds: Iterable[float]) -> dict[str, float]:
    """Returns P50, P99 and the longest; nothing for no times."""
    times = list(seconds)
    return (
        {name: quantile(times, share) for name, share in (("p50", 0.5), ("p99", 0.99), ("longest", 1.0))}
        if times
        else {}
    )


def _slowest(found: Found) -> dict[str, float]:
    """Returns the time of the control client's slowest call beside each fault and abuse, seconds."""
    slowest = dict.fromkeys(sorted({one.name for one in found.windows}), 0.0)
    for call in found.recorder.calls:
        if call.client == "control":
            for one in found.windows_of(call):
                slowest[one.name] = max(slowest[one.name], call.ended_s - call.sent_s)
    return slowest


def _lasting(before: Sequence[Memory], after: Sequence[Memory]) -> dict[str, dict[str, int]]:
    """Memory of the processes that lived through, at the ends of both calm phases."""
    return {
        one.name: {
            "rss_before": one.rss_bytes, "rss_after": later.rss_bytes,
            "pss_before": one.pss_bytes, "pss_after": later.pss_bytes,
        }
        for one in before
        for later in after
        if (one.name, one.pid) == (later.name, later.pid)
    }  # fmt: skip


def section(figures: Mapping[str, Any]) -> str:
    """Returns the Markdown of this section of RESULTS.md."""
    plan, outcomes = figures["plan"], figures["outcomes"]
    total: Counter[str] = Counter()
    for by_kind in outcomes.values():
        for counts in by_kind.values():
            total.update(counts)
    question = (
        "## soak\n\nDoes anybody get a wrong answer, or none, while a fleet is damaged and abused? Goals: no wrong "
        "answer, no call that hangs, P99 of the control client ≤ 2 × calm."
    )
    results: list[list[object]] = [
        *([name, total[name]] for name in (RIGHT, WRONG, HUNG)),
        ["processes that ended by themselves", len(figures["ended_by_themselves"])],
        ["encodes ÷ distinct pictures", f"{figures['num_encodes']} ÷ {figures['num_pictures']}"],
    ]
    others = [[name, number] for name, number in sorted(total.items()) if name not in (RIGHT, WRONG, HUNG)]
    ends = outcomes["control"]
    all_but_calm = sum((Counter(some) for kind, some in ends.items() if kind != CALM), Counter[str]())
    control = [
        [
            kind,
            *(f"{1000 * times[name]:.0f} ms" if times else "" for name in ("p50", "p99", "longest")),
            _failed({**ends, _STORM: all_but_calm}[kind]),
        ]
        for kind, times in figures["control_s"].items()
    ]
    memory = [
        [name, *(f"{used[key] / 1e6:.0f} MB" for key in ("rss_before", "rss_after", "pss_before", "pss_after"))]
        for name, used in figures["memory"].items()
    ]
    note = (
        f"{plan['duration_s'] / 60:g} minutes, of which {plan['calm_s']:g} s calm at each end; seed {plan['seed']}; "
        f"{figures['num_windows']} faults and abuses, one every {plan['interval_s']:g} s;\nfaults and abuses take "
        f"turns. A call counts as under them if one or its echo of {plan['echo_s']:g} s overlaps it."
    )
    return "\n\n".join(
        [
            question,
            report.table(["answers", ""], results),
            report.table(["other ends of calls", ""], others),
            report.table(["control client", "P50", "P99", "longest", "not answered"], control),
            report.table(
                ["slowest call of the control client beside", ""],
                [[name, f"{1000 * longest:.0f} ms"] for name, longest in figures["slowest_control_s"].items()],
            ),
            report.table(["memory, before and after", "RSS", "RSS", "PSS", "PSS"], memory),
            note,
        ]
    )


def _failed(counts: Mapping[str, int]) -> str:
    """Says how many calls did not get the right answer, of how many."""
    return f"{sum(counts.values()) - counts.get(RIGHT, 0)} of {sum(counts.values())}"
