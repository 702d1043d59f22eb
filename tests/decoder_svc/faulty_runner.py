"""A runner whose steps obey a fault file, which is the first argument of the program (faulty_program.py)."""

from __future__ import annotations

import pathlib
import sys

from decoder_svc.runner.cpu.runner import CPUModelRunner
from decoder_svc.scheduling.scheduler_output import SampledToken, SchedulerOutput
from tests.fault_file import FaultFile


class FaultyRunner(CPUModelRunner):
    """Obeys the fault file before each step that computes something."""

    def execute_model(self, output: SchedulerOutput) -> list[SampledToken]:
        if output.chunks:
            FaultFile(pathlib.Path(sys.argv[1])).obey()
        return super().execute_model(output)
