"""Free memory of machine and container, and the peak memory of a piece of work."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import psutil
import pytest

from decoder_svc.runner.free_memory import free_bytes, measured_peak

MIB = 1 << 20
ROOT = pathlib.Path(__file__).parents[3]
NOWHERE = pathlib.Path("/nowhere")


def group(folder: pathlib.Path, limit: str, usage: int, droppable: int = 0) -> None:
    """Writes the files of a version 2 cgroup."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {droppable}\nactive_file 7\n")


@pytest.fixture
def own(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "own"
    path.write_text("0::/pods/decoder\n")
    return path


def test_without_a_container_the_machines_free_memory_counts() -> None:
    free = free_bytes(NOWHERE, NOWHERE)
    assert 0 < free <= psutil.virtual_memory().total


def test_the_containers_limit_minus_its_usage_counts(tmp_path: pathlib.Path, own: pathlib.Path) -> None:
    group(tmp_path / "root/pods/decoder", str(30 * MIB), 10 * MIB)
    assert free_bytes(tmp_path / "root", own) == 20 * MIB


def test_page_cache_that_can_be_dropped_is_free(tmp_path: pathlib.Path, own: pathlib.Path) -> None:
    group(tmp_path / "root/pods/decoder", str(30 * MIB), 10 * MIB, droppable=4 * MIB)
    assert free_bytes(tmp_path / "root", own) == 24 * MIB


def test_the_tightest_of_nested_limits_counts(tmp_path: pathlib.Path, own: pathlib.Path) -> None:
    group(tmp_path / "root/pods/decoder", "max", 10 * MIB)
    group(tmp_path / "root/pods", str(12 * MIB), 11 * MIB)
    group(tmp_path / "root", str(40 * MIB), 20 * MIB)
    assert free_bytes(tmp_path / "root", own) == MIB


def test_a_cgroup_path_of_the_host_falls_back_to_the_mounted_root(tmp_path: pathlib.Path, own: pathlib.Path) -> None:
    group(tmp_path / "root", str(8 * MIB), 5 * MIB)
    assert free_bytes(tmp_path / "root", own) == 3 * MIB


def test_version_1_cgroups_are_supported(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "root/memory"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(str(9 * MIB))
    (folder / "memory.usage_in_bytes").write_text(str(7 * MIB))
    (folder / "memory.stat").write_text(f"total_inactive_file {MIB}\n")
    assert free_bytes(tmp_path / "root", NOWHERE) == 3 * MIB


def test_over_the_limit_nothing_is_free(tmp_path: pathlib.Path, own: pathlib.Path) -> None:
    group(tmp_path / "root/pods/decoder", str(MIB), 2 * MIB)
    assert free_bytes(tmp_path / "root", own) == 0


def test_the_peak_includes_memory_released_before_the_end() -> None:
    with measured_peak() as peak:
        taken = bytearray(b"\1") * (200 * MIB)
        del taken
    assert peak.extra_bytes >= 190 * MIB


_REUSES_FREED_MEMORY = """
import gc
from decoder_svc.runner.free_memory import measured_peak
from lookonce.process.heap import set_up_heap

MIB = 1 << 20
set_up_heap()
earlier = [bytearray(b"\\1") * (200 * MIB)]
earlier.append({earlier})
del earlier
with measured_peak() as peak:
    gc.collect()
    taken = bytearray(b"\\1") * (200 * MIB)
    del taken
assert peak.extra_bytes >= 190 * MIB, peak.extra_bytes
"""


@pytest.mark.parametrize("earlier", ["None", "earlier"], ids=["freed", "garbage"])
def test_the_peak_includes_memory_that_was_taken_before_the_block(earlier: str) -> None:
    """The heaviest step took again what trying the kernels had left, and its measured peak was too low."""
    program = _REUSES_FREED_MEMORY.format(earlier=earlier)
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, cwd=ROOT)
