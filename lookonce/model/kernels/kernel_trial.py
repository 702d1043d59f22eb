"""Times a kernel against PyTorch's on each machine, so that ours is never used where it is slower.

A trial runs in one thread and counts its processor time. The times are kept in the cache folder of the compiled
libraries. A new processor, version of PyTorch, level, compiler or kernel source makes a new trial, and so does an
implementation that could not run in an earlier one.

Work on the other half of a core slows all implementations down, the faster ones more. So if the times of a trial are
close, the next processes repeat it, and the shortest time of each implementation counts: on an AVX2 level, a busy
moment had kept a kernel of 14.7 ms in the place of one of 12.1 (2026-11-28).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import pathlib
import platform
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping

import torch

from lookonce.logs import get_logger
from lookonce.model.kernels.kernel_choice import PYTORCH, KernelChoice
from lookonce.model.kernels.native_compiler import NativeLibraryError
from lookonce.model.kernels.native_level import native_level
from lookonce.model.kernels.native_library import library_identity, trusted_cache_folder

# Another implementation must be faster by this factor. Below it the difference may be noise, and ours has its other
# properties: a row has the same bits in every batch.
_MARGIN = 1.1
# The fastest of so many rounds counts.
_NUM_ROUNDS = 5
# The two fastest are close if the second takes less than so many times the time of the first.
_CLOSE = 1.25
# A trial is repeated by so many processes at most, the first one included.
_MAX_TRIALS = 3
# Environment variables that take instructions away from PyTorch's libraries.
_LIMITS = ("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")

_log = get_logger(__name__)

# One implementation of an operation, ready to run on fixed inputs in one thread.
Candidate = Callable[[], object]


# The choices of this process by operation.
_choices: dict[str, KernelChoice] = {}


def kernel_choices() -> tuple[KernelChoice, ...]:
    """Returns the choices that this process has made, ordered by operation."""
    return tuple(_choices[operation] for operation in sorted(_choices))


def choose_kernel(
    operation: str, sources: pathlib.Path, candidates: Mapping[str, Callable[[], Candidate]]
) -> KernelChoice:
    """Returns the fastest of `candidates`, in which PyTorch's is named "pytorch".

    The first one that can run is preferred: another must be faster by 10 %. Each value prepares its implementation,
    and may raise NativeLibraryError if it cannot run here. `sources` is the folder of the kernel's source. Takes up to
    a second the first time on a machine. Not thread-safe.
    """
    if operation in _choices:
        return _choices[operation]
    key = _key(operation, sources, list(candidates))
    seconds, num_trials = _remembered(key)
    if num_trials == 0 or not _is_complete(candidates, seconds):
        seconds, num_trials = {}, 0
    if num_trials == 0 or (num_trials < _MAX_TRIALS and _is_close(seconds)):
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            found = _timed(candidates)
            seconds = {name: min(found[name], seconds.get(name, math.inf)) for name in found}
        finally:
            torch.set_num_threads(num_threads)
        _remember(key, seconds, num_trials + 1)
    choice = KernelChoice(operation, _winner(candidates, seconds), seconds)
    _choices[operation] = choice
    return choice


def _winner(candidates: Iterable[str], seconds: Mapping[str, float]) -> str:
    """Returns the first of `candidates` that was timed, or the fastest if that is clearly faster."""
    preferred = next(name for name in candidates if name in seconds)
    fastest = min(seconds, key=lambda name: seconds[name])
    return fastest if seconds[fastest] * _MARGIN < seconds[preferred] else preferred


def _is_close(seconds: Mapping[str, float]) -> bool:
    first, *others = sorted(seconds.values())
    return bool(others) and others[0] < first * _CLOSE


def _is_complete(candidates: Mapping[str, Callable[[], Candidate]], seconds: Mapping[str, float]) -> bool:
    """Whether the winner of an earlier trial can run in this process, and no candidate can that was not timed.

    The compiler may be gone, or it may have been missing, or killed, in the earlier process.
    """
    untimed = [name for name in candidates if name not in seconds]
    return _can_run(candidates[_winner(candidates, seconds)]) and not any(
        _can_run(candidates[name]) for name in untimed
    )


def _can_run(prepare: Callable[[], Candidate]) -> bool:
    try:
        prepare()
    except NativeLibraryError:
        return False
    return True


def _timed(candidates: Mapping[str, Callable[[], Candidate]]) -> dict[str, float]:
    """Returns the shortest time of each candidate that can run."""
    runs: dict[str, Candidate] = {}
    for name, prepare in candidates.items():
        try:
            runs[name] = prepare()
        except NativeLibraryError:
            continue
    seconds = dict.fromkeys(runs, float("inf"))
    with torch.inference_mode():
        for run in runs.values():
            run()
        for _ in range(_NUM_ROUNDS):
            for name, run in runs.items():
                start_s = time.thread_time()
                run()
                seconds[name] = min(seconds[name], time.thread_time() - start_s)
    return seconds


def _key(operation: str, sources: pathlib.Path, names: list[str]) -> str:
    pytorch = (torch.__version__, torch.backends.cpu.get_cpu_capability())
    limits = (f"{name}={os.environ.get(name, '')}" for name in _LIMITS)
    parts = [operation, *names, _processor(), *pytorch, *limits, library_identity(sources, native_level())]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _processor() -> str:
    """Returns the processor's name: that of the first core on Linux, else what Python knows."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line for line in lines if line.startswith(("model name", "CPU part"))]
    return names[0] if names else f"{platform.machine()} {platform.processor()}"


def _remembered(key: str) -> tuple[dict[str, float], int]:
    """Returns the shortest times of earlier trials, and the number of trials: 0 without a usable file."""
    try:
        found = json.loads((trusted_cache_folder() / f"trial-{key}.json").read_text())
        seconds, num_trials = found["seconds"], found["num_trials"]
    except (OSError, ValueError, LookupError, TypeError, NativeLibraryError):
        return {}, 0
    if not isinstance(seconds, dict) or PYTORCH not in seconds or not isinstance(num_trials, int) or num_trials < 1:
        return {}, 0
    if not all(isinstance(value, float) and value > 0 for value in seconds.values()):
        return {}, 0
    return {str(name): float(value) for name, value in seconds.items()}, num_trials


def _remember(key: str, seconds: Mapping[str, float], num_trials: int) -> None:
    """Writes the times for the next process. Without a writable folder, each process makes its own trial."""
    try:
        folder = trusted_cache_folder()
        with tempfile.TemporaryDirectory(dir=folder) as workplace:
            written = pathlib.Path(workplace) / "trial"
            written.write_text(json.dumps({"seconds": dict(seconds), "num_trials": num_trials}))
            written.replace(folder / f"trial-{key}.json")
    except (OSError, NativeLibraryError) as error:
        _log.info("times of kernels are not remembered", reason=str(error))
