"""Measures the memory that this process may still take and the peak memory of a piece of work. For CPU runners."""

from __future__ import annotations

import contextlib
import gc
import logging
import pathlib
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import psutil

from lookonce.process.heap import return_freed_memory

logger = logging.getLogger(__name__)

_CGROUP_ROOT = pathlib.Path("/sys/fs/cgroup")
_OWN_CGROUPS = pathlib.Path("/proc/self/cgroup")
_STATUS = pathlib.Path("/proc/self/status")
_CLEAR_REFS = pathlib.Path("/proc/self/clear_refs")
# Writing this to clear_refs resets the peak resident memory to the current value (proc(5)).
_RESET_PEAK = "5"


def free_bytes(cgroup_root: pathlib.Path = _CGROUP_ROOT, own_cgroups: pathlib.Path = _OWN_CGROUPS) -> int:
    """Returns the bytes available without swapping, or fewer if a container's limit is lower."""
    return min([psutil.virtual_memory().available, *_cgroup_headrooms(cgroup_root, own_cgroups)])


def _cgroup_headrooms(root: pathlib.Path, own_cgroups: pathlib.Path) -> Iterator[int]:
    """Yields the bytes left under each cgroup limit of this process. Page cache that can be dropped counts as free."""
    with contextlib.suppress(OSError, StopIteration):
        line = next(line for line in own_cgroups.read_text().splitlines() if line.startswith("0::"))
        group = root / line.removeprefix("0::").lstrip("/")
        # In a container the path may be the host's, of which only the root is mounted.
        for folder in (group, *group.parents):
            if not folder.is_relative_to(root):
                break
            with contextlib.suppress(OSError, ValueError):
                yield _headroom(folder, "memory.max", "memory.current", "inactive_file")
    with contextlib.suppress(OSError, ValueError):
        yield _headroom(root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _headroom(folder: pathlib.Path, limit: str, usage: str, droppable: str) -> int:
    """Returns the bytes left in one cgroup.

    Raises ValueError if it has no limit ("max") and OSError if it does not exist.
    """
    limit_bytes = int((folder / limit).read_text())
    usage_bytes = int((folder / usage).read_text())
    fields = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    return max(0, limit_bytes - usage_bytes + int(fields.get(droppable, 0)))


@dataclass(slots=True)
class PeakMemory:
    """Result of `measured_peak`, set when its block ends."""

    # Peak resident memory minus resident memory at the start.
    extra_bytes: int = 0


@contextlib.contextmanager
def measured_peak() -> Iterator[PeakMemory]:
    """Measures the additional memory that the block takes at its peak.

    Garbage is collected and freed memory returned to the system first. Otherwise the block would take it again, for
    instance what trying the kernels has left, and it would count as taken before the block. Ask for the free memory
    inside the block.

    If the system does not allow resetting the peak, an earlier and higher peak may be counted: the result is then too
    high, never too low.
    """
    gc.collect()
    return_freed_memory()
    resident = psutil.Process().memory_info().rss
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except OSError as error:
        logger.info(
            "cannot reset the peak of resident memory (%s): the measured peak includes loading the model", error
        )
    peak = PeakMemory()
    yield peak
    peak.extra_bytes = max(0, _peak_resident_bytes() - resident)


def _peak_resident_bytes() -> int:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    # Fallback: this value never falls and starts at the parent process's peak. In kilobytes, except on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
