"""The program of `serving_program.py` in a process of its own."""

from __future__ import annotations

import asyncio
import json
import pathlib
import subprocess
import sys

from tests.lookonce.server.running_server import until

PROGRAM = [sys.executable, "-m", "tests.lookonce.server.serving_program"]
ROOT = pathlib.Path(__file__).parents[3]


class ProgramProcess:
    """The process, which has started when this object exists."""

    def __init__(self, folder: pathlib.Path, *flags: str) -> None:
        self.ready_file = folder / "ready.json"
        command = [*PROGRAM, "--model", ".", "--ready-file", str(self.ready_file), *flags]
        self.log_file = (folder / "log").open("w+")
        self.popen = subprocess.Popen(command, stderr=self.log_file, cwd=ROOT)

    async def target(self) -> str:
        async def written() -> bool:
            assert self.popen.poll() is None, self.log()
            return self.ready_file.exists()

        await until(written)
        return str(json.loads(self.ready_file.read_text())["target"])

    def log(self) -> str:
        self.log_file.flush()
        return pathlib.Path(self.log_file.name).read_text()

    async def exit_status(self) -> int:
        return await asyncio.to_thread(self.popen.wait, 20)
