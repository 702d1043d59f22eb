"""Starts a Python process that imports what this one does, and that the kernel kills when this one ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

# Runs in the new process before anything else. First it asks the kernel to kill the process with its parent, and exits
# if the parent has already ended. Signals for all processes of a service are the parent's to handle.
_BEGINNING = """\
import os, signal, sys
if sys.platform == "linux":
    import ctypes
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() != int(sys.argv.pop(1)):
    sys.exit(1)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
import json, runpy
sys.path[:] = json.loads(sys.argv.pop(1))
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


def start_bound_process(
    module: str, arguments: Sequence[str], fds: Sequence[int], environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Starts `python -m module` with these open files and this process's output. Raises OSError.

    It has the import path of this process, so that both are of one version, and its environment, to which `environment`
    is added. On Linux it is killed when the *thread* that started it ends. Ctrl-C in a terminal does not reach it, and
    it ignores SIGINT, SIGTERM and SIGHUP.
    """
    command = [sys.executable, "-P", "-c", _BEGINNING, str(os.getpid()), json.dumps(sys.path), module, *arguments]
    variables = {**os.environ, **(environment or {})}
    return subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL, start_new_session=True, env=variables)
