"""Finds the runner class that a device's platform names."""

from __future__ import annotations

import inspect

from decoder_svc.runner.base import ModelRunnerBase
from decoder_svc.runner.parallel.rank_engine import RankEngine
from lookonce.devices.base import DevicePlatform
from lookonce.devices.registry import imported_part
from lookonce.errors import ConfigurationError


def runner_class(platform: DevicePlatform) -> type[ModelRunnerBase]:
    """Imports and returns the runner class of a platform.

    Raises ConfigurationError if there is no such class, or if it lacks one of the functions that a device must have.
    """
    kind = imported_part(platform, platform.runner)
    if not (inspect.isclass(kind) and issubclass(kind, ModelRunnerBase)):
        raise ConfigurationError(
            f"--device: {platform.runner} of the device {platform.name} is no subclass of ModelRunnerBase"
        )
    if missing := sorted(kind.__abstractmethods__):
        raise ConfigurationError(
            f"--device: {platform.runner} of the device {platform.name} lacks {', '.join(missing)}"
        )
    return kind


def rank_engine(platform: DevicePlatform) -> RankEngine:
    """Returns what moves tensors between the ranks of a split model on a platform.

    Raises ConfigurationError if it computes whole models only.
    """
    engine = runner_class(platform).rank_engine
    if engine is None:
        raise ConfigurationError(
            f"tensor_parallel_size is not offered on the device {platform.name} yet: leave one of the two out"
        )
    return engine
