"""A runner whose steps obey a fault file, which an environment variable names (faulty_program.py)."""

from __future__ import annotations

import os
import pathlib

from decoder_svc.runner.cpu.runner import CPUModelRunner
from decoder_svc.scheduling.scheduler_output import SampledToken, SchedulerOutput
from tests.decoder_svc.faulty_engine_worker import FAULT_FILE
from tests.fault_file import FaultFile


class FaultyRunner(CPUModelRunner):
    """Obeys the fault file before each step that computes something."""

    def execute_model(self, output: SchedulerOutput) -> list[SampledToken]:
        if output.chunks:
            FaultFile(pathlib.Path(os.environ[FAULT_FILE])).obey()
        return super().execute_model(output)
