"""The runner class that a platform names is found, and one that is no runner is refused before a model is loaded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from decoder_svc.runner.base import ModelRunnerBase
from decoder_svc.runner.cpu.runner import CPUModelRunner
from decoder_svc.runner.cuda.runner import GPUModelRunner
from decoder_svc.runner.selection import runner_class
from lookonce.devices import cpu, cuda
from lookonce.errors import ConfigurationError


class Unfinished(ModelRunnerBase):
    """A runner with two of the four functions."""

    def _cache_device_properties(self) -> None: ...

    def load_model(self) -> None: ...


def test_our_own_devices_name_their_runners() -> None:
    assert runner_class(cpu.PLATFORM) is CPUModelRunner
    assert runner_class(cuda.PLATFORM) is GPUModelRunner


@pytest.mark.parametrize(
    ("runner", "reason"),
    [
        ("no_such_module:Runner", "cannot be imported .ModuleNotFoundError"),
        ("decoder_svc.runner.base:NoSuchRunner", "cannot be imported .AttributeError"),
        ("decoder_svc.runner.base:RunnerConfig", "is no subclass of ModelRunnerBase"),
        ("decoder_svc.runner.base:logger", "is no subclass of ModelRunnerBase"),
        (f"{__name__}:Unfinished", "lacks capture_model, profile_run$"),
    ],
)
def test_what_is_no_runner_is_refused_with_the_reason(runner: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--device: {runner} of the device cpu {reason}"):
        runner_class(replace(cpu.PLATFORM, runner=runner))
