"""The engine process of a decoder whose steps obey a fault file (faulty_program.py)."""

from __future__ import annotations

from dataclasses import replace

from decoder_svc import engine_worker
from lookonce.devices import cpu, registry

# The environment variable with the fault file's path.
FAULT_FILE = "FAULT_FILE"


def register() -> None:
    """Makes the faulty runner that of the CPUs, in this process."""
    registry._BUILT_IN = (replace(cpu.PLATFORM, runner="tests.decoder_svc.faulty_runner:FaultyRunner"),)


if __name__ == "__main__":
    register()
    engine_worker.main()
