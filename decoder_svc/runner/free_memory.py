"""How much memory this process may still take, and how much a piece of work takes at its peak. For CPU runners."""

from __future__ import annotations

import contextlib
import logging
import pathlib
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import psutil

logger = logging.getLogger(__name__)

_CGROUP_ROOT = pathlib.Path("/sys/fs/cgroup")
_OWN_CGROUPS = pathlib.Path("/proc/self/cgroup")
_STATUS = pathlib.Path("/proc/self/status")
_CLEAR_REFS = pathlib.Path("/proc/self/clear_refs")
# Written there, it sets the peak of the resident memory back to what is resident now (proc(5)).
_RESET_PEAK = "5"


def free_bytes(cgroup_root: pathlib.Path = _CGROUP_ROOT, own_cgroups: pathlib.Path = _OWN_CGROUPS) -> int:
    """Bytes that the machine can give without swapping, or fewer where a container's limit comes first."""
    return min([psutil.virtual_memory().available, *_cgroup_rooms(cgroup_root, own_cgroups)])


def _cgroup_rooms(root: pathlib.Path, own_cgroups: pathlib.Path) -> Iterator[int]:
    """What each limit above this process leaves; page cache that can be dropped at once counts as left."""
    with contextlib.suppress(OSError, StopIteration):
        line = next(line for line in own_cgroups.read_text().splitlines() if line.startswith("0::"))
        group = root / line.removeprefix("0::").lstrip("/")
        # In a container the path may be that of the host, of which only the root is mounted.
        for folder in (group, *group.parents):
            if not folder.is_relative_to(root):
                break
            with contextlib.suppress(OSError, ValueError):
                yield _room(folder, "memory.max", "memory.current", "inactive_file")
    with contextlib.suppress(OSError, ValueError):
        yield _room(root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _room(folder: pathlib.Path, limit: str, usage: str, droppable: str) -> int:
    """Raises ValueError where there is no limit ("max"), OSError where there is no such group."""
    limit_bytes = int((folder / limit).read_text())
    usage_bytes = int((folder / usage).read_text())
    fields = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    return max(0, limit_bytes - usage_bytes + int(fields.get(droppable, 0)))


@dataclass(slots=True)
class PeakMemory:
    """What `measured_peak` found, once its block has ended."""

    # Resident memory at the peak over that at the start.
    extra_bytes: int = 0


@contextlib.contextmanager
def measured_peak() -> Iterator[PeakMemory]:
    """How much more memory the block takes at its peak.

    Where the system does not let a process reset its peak, an earlier, higher one counts: too much, never too little.
    """
    resident = psutil.Process().memory_info().rss
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except OSError as error:
        logger.info("the peak of the memory cannot be reset (%s): loading the model counts, too", error)
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
    # This one never falls, and begins with what the process that started this one had. Kilobytes but on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
