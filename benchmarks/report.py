"""Writes figures: JSON in `benchmarks/results/`, and each script's own section of RESULTS.md."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from lookonce.model.kernels.native_level import native_level, processor_levels

_FOLDER = pathlib.Path(__file__).parent
RESULTS = _FOLDER / "RESULTS.md"
JSON_FOLDER = _FOLDER / "results"


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine on which figures were taken."""

    # The processor's own model name.
    cpu: str
    # CPUs that this process may use.
    num_cpus: int
    # The level of the CPU kernels, which can be forced below the processor's.
    native_level: str
    system: str
    python: str

    def __str__(self) -> str:
        return f"{self.num_cpus} × {self.cpu}, kernels {self.native_level}, {self.system}, Python {self.python}"


def this_machine() -> Machine:
    """The machine that this runs on."""
    num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    level = native_level().name
    return Machine(_cpu_name(), num_cpus, level, f"{platform.system()} {platform.machine()}", platform.python_version())


def add_quick(parser: argparse.ArgumentParser) -> None:
    """Adds the flag `--quick`, the smallest form that still runs all code."""
    parser.add_argument(
        "--quick", action="store_true", help="few repeats with a tiny model: shows that it runs; writes no results"
    )


def publish(script: str, figures: Mapping[str, object], section: str, *, is_quick: bool) -> None:
    """Writes the script's JSON and its section of RESULTS.md. A quick run prints them: its figures claim nothing."""
    machine = this_machine()
    figures = {"machine": asdict(machine), **figures}
    if is_quick:
        print(f"{section}\n\n{json.dumps(figures)}", flush=True)
        return
    name = _result_name(script)
    path = write_json(name, figures)
    write_section(name, section.replace(f"## {script}", f"## {name}", 1), machine)
    print(f"wrote {path} and {RESULTS}", flush=True)


def _result_name(script: str) -> str:
    """Returns the name of a script's results. Those at a forced level stand beside the machine's own."""
    level = native_level()
    return script if level == processor_levels()[-1] else f"{script}_{level.name}"


def write_json(script: str, figures: Mapping[str, object]) -> pathlib.Path:
    """Replaces the script's JSON file and returns its path."""
    JSON_FOLDER.mkdir(exist_ok=True)
    path = JSON_FOLDER / f"{script}.json"
    path.write_text(json.dumps(figures, indent=1) + "\n", "utf-8")
    return path


def write_section(script: str, text: str, machine: Machine) -> None:
    """Replaces the script's section of RESULTS.md, or appends it where there is none yet."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    page = RESULTS.read_text("utf-8")
    RESULTS.write_text(page_with_section(page, script, f"{text}\n\n{today}, {machine}."), "utf-8")


def page_with_section(page: str, script: str, text: str) -> str:
    """`page` with `text` between the script's marks; where they are missing they are appended."""
    begin, end = f"<!-- {script} -->", f"<!-- end of {script} -->"
    if begin not in page:
        page += f"\n{begin}{end}\n"
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Returns a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


def _cpu_name() -> str:
    """Returns the processor's name from /proc/cpuinfo, or from the platform module elsewhere."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown CPU"
