"""Makes runners whose model is split over several devices of this machine, for `benchmarks.gpu`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.gpu_checks import MakeRunner
from decoder_svc.prompt.family import DecoderFamily
from decoder_svc.rank_start import rank_config
from decoder_svc.runner.base import ModelRunnerBase
from decoder_svc.runner.parallel.leader import Leader
from decoder_svc.runner.parallel.other_ranks import OtherRanks
from decoder_svc.runner.parallel.rank_processes import RankProcesses
from decoder_svc.runner.runner_config import RunnerConfig
from lookonce.errors import ConfigurationError

# Threads for tensor work of each other rank.
_NUM_THREADS = 1


@contextlib.contextmanager
def split_over(num_ranks: int, kind: type[ModelRunnerBase], device: str) -> Iterator[MakeRunner]:
    """Yields a function that makes runners of this kind, each with other ranks of its own, which end with the block.

    `device` is the name of the device's platform. Raises ConfigurationError if so many ranks cannot run here.
    """
    engine = kind.rank_engine
    if engine is None:
        raise ConfigurationError(f"{kind.__name__} computes whole models only")
    environments = engine.environments(num_ranks)
    with contextlib.ExitStack() as ended:

        def make(config: RunnerConfig, family: DecoderFamily) -> ModelRunnerBase:
            processes = RankProcesses(environments, [str(config.folder), str(_NUM_THREADS), "console", "warning"])
            ended.callback(processes.close)
            others = OtherRanks(processes.connections)
            ended.callback(others.close)
            shared = rank_config(config, device, str(config.dtype).removeprefix("torch."))
            ranks = others.meet(shared, engine)
            runner = kind(replace(config, ranks=ranks), family)
            others.wait_until_loaded()
            runner.lead(Leader(ranks, others.connections))
            return runner

        yield make
