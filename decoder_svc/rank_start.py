"""Starts the other ranks of a split model, or waits for those that run on other machines."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import msgspec
import torch
import transformers

from decoder_svc.device_choice import DeviceChoice
from decoder_svc.runner.parallel.messages import RankConfig
from decoder_svc.runner.parallel.model_digest import model_digest
from decoder_svc.runner.parallel.other_ranks import OtherRanks
from decoder_svc.runner.parallel.rank_group import RankGroup
from decoder_svc.runner.parallel.rank_handshake import read_key
from decoder_svc.runner.parallel.rank_listener import RankListener
from decoder_svc.runner.parallel.rank_processes import RankProcesses
from decoder_svc.runner.parallel.split_model import kv_heads_of_rank
from decoder_svc.runner.runner_config import RunnerConfig
from decoder_svc.runner.selection import rank_engine
from decoder_svc.settings import DecoderSettings
from lookonce import __version__
from lookonce.errors import ConfigurationError
from lookonce.model.model_folder import ModelFolder

TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@contextmanager
def started_ranks(settings: DecoderSettings, device: DeviceChoice) -> Iterator[OtherRanks | None]:
    """Yields the other ranks of a split model, which have started or come, and ends them if the block raises.

    None: the model is not split. Raises ConfigurationError for settings that do not go with a split model.
    """
    if settings.tensor_parallel_size == 1:
        yield None
        return
    environments = _environments(settings, device)
    number = settings.tensor_parallel_size - 1
    if settings.rank_listen is not None:
        ranks, processes = _found_ranks(settings, number), None
    else:
        processes = RankProcesses(environments, _arguments(settings))
        ranks = OtherRanks(processes.connections)
    try:
        yield ranks
    except BaseException:
        ranks.close()
        if processes is not None:
            processes.close()
        raise


def rank_config(config: RunnerConfig, device: str, dtype: str | None) -> RankConfig:
    """Returns what all ranks load alike, from the configuration of rank 0 and the names of its device and type."""
    own = ("device", "dtype", "has_adapters")
    shared = {name: getattr(config, name) for name in RankConfig.__struct_fields__ if name not in own}
    return RankConfig(device=device, dtype=dtype, has_adapters=config.adapters is not None, **shared)


def config_of_rank(config: RankConfig, folder: ModelFolder, num_threads: int | None, ranks: RankGroup) -> RunnerConfig:
    """Returns the configuration of a rank's runner, for a process that is not rank 0."""
    values = msgspec.structs.asdict(config)
    del values["device"]
    # Rank 0 reads the folders, and tells what is in them.
    adapters = () if values.pop("has_adapters") else None
    dtype = None if config.dtype is None else TORCH_DTYPES[config.dtype]
    return RunnerConfig(
        **{**values, "dtype": dtype, "adapters": adapters}, folder=folder.path, num_threads=num_threads, ranks=ranks
    )


def threads_of_rank(settings: DecoderSettings) -> int | None:
    """Returns the threads of each rank on this machine, whose CPUs they share; None: all CPUs."""
    has_others_here = settings.tensor_parallel_size > 1 and settings.rank_listen is None
    if settings.num_threads is not None or not has_others_here:
        return settings.num_threads
    return max(1, len(os.sched_getaffinity(0)) // settings.tensor_parallel_size)


def _environments(settings: DecoderSettings, device: DeviceChoice) -> list[Mapping[str, str]]:
    """Returns the variables of the other ranks' processes on this machine.

    Raises ConfigurationError for settings that do not go with a split model.
    """
    engine = rank_engine(device.platform)
    if not hasattr(select, "POLLRDHUP"):
        raise ConfigurationError("tensor_parallel_size is not offered on this operating system yet: leave it out")
    # Each rank would find it as well, after it has loaded its libraries.
    config = transformers.AutoConfig.from_pretrained(settings.model, trust_remote_code=False, local_files_only=True)
    kv_heads_of_rank(config.get_text_config(), settings.tensor_parallel_size)
    return engine.environments(settings.tensor_parallel_size if settings.rank_listen is None else 1)


def _found_ranks(settings: DecoderSettings, number: int) -> OtherRanks:
    """Waits for ranks from other machines."""
    assert settings.rank_listen is not None
    assert settings.rank_key_file is not None, "they belong together"
    key = read_key(settings.rank_key_file)
    host, _, port = settings.rank_listen.rpartition(":")
    digest = model_digest(ModelFolder.open(settings.model))
    with RankListener(host.strip("[]"), int(port), key, __version__, digest) as listener:
        return OtherRanks(*listener.wait_for(number))


def _arguments(settings: DecoderSettings) -> list[str]:
    """Returns the arguments of a rank's process on this machine."""
    return [str(settings.model), str(threads_of_rank(settings)), settings.log_format, settings.log_level]
