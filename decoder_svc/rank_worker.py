"""One rank of a split model, in a process of its own. Engines start it (RankProcesses), or `lookonce serve rank` is it.

It learns from rank 0 what to load, loads its part of the model, and computes its part of each step until rank 0 ends.
"""

from __future__ import annotations

import logging
import os
import pathlib
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from lookonce.errors import LookonceError
from lookonce.model.kernels.openmp import set_openmp_spin_count
from lookonce.model.libraries.lean_transformers import import_lean_transformers
from lookonce.model.model_folder import ModelFolder, needs_torchvision
from lookonce.process.garbage import long_lived_objects, settle
from lookonce.process.heap import set_up_heap
from lookonce.server.telemetry import configure_logging

if TYPE_CHECKING:
    from decoder_svc.runner.parallel.leader_search import FoundLeader

logger = logging.getLogger(__name__)

# Time in which rank 0 ends when another rank has, seconds.
_END_S = 5.0


def serve(find: Callable[[], FoundLeader], model: pathlib.Path, num_threads: int | None) -> None:
    """Loads this rank's part of the model, says so, and runs steps. Raises what loading raises.

    `find` waits for rank 0, and is called once the libraries are loaded. Returns when rank 0 has ended.
    """
    set_openmp_spin_count()
    # Imported here, because torch and transformers take seconds.
    with long_lived_objects():
        import_lean_transformers(needs_torchvision=needs_torchvision(model), shows_progress=False)
        from decoder_svc.prompt.family import load_family
        from decoder_svc.rank_start import config_of_rank
        from decoder_svc.runner.parallel.meeting_store import RemoteStore
        from decoder_svc.runner.parallel.messages import Loaded, encoded
        from decoder_svc.runner.parallel.other_ranks import has_hung_up
        from decoder_svc.runner.parallel.rank_group import RankGroup
        from decoder_svc.runner.rank_steps import RankSteps
        from decoder_svc.runner.selection import rank_engine, runner_class
        from lookonce.devices.registry import chosen_platform
        from lookonce.model.kernels.openmp import run_in_short_lived_thread
        from lookonce.model.pretrained_tokenizer import load_pretrained

    folder = ModelFolder.open(model)
    family = load_family(folder, load_pretrained(model))
    connection, address, start = find()
    try:
        platform, store = chosen_platform(start.config.device), RemoteStore(connection)
        group = RankGroup(start.rank, start.size, store, rank_engine(platform), address)
        store.leave()
        config = config_of_rank(start.config, folder, num_threads, group)
        make = runner_class(platform)
        runner = run_in_short_lived_thread(lambda: make(config, family))
        settle()
        connection.send_bytes(encoded(Loaded()))
        RankSteps(runner, group, connection).run()
    except (EOFError, OSError, RuntimeError):
        # If it is the end of another rank, rank 0 ends as well.
        if not has_hung_up([connection], _END_S):
            raise


def run(rank: Callable[[], int]) -> None:
    """Runs a rank and ends the process with the status that it returns. A step that hangs does not keep it."""
    try:
        status = rank()
    except LookonceError as error:
        # Rank 0 finds the same about the model, and tells it.
        logger.error("the rank does not start: %s", error)
        status = 1
    except Exception:
        logger.exception("the rank failed")
        status = 1
    os._exit(status)


def main() -> None:
    """Runs the process. Arguments: file of the connection to rank 0, model folder, threads, log format and level."""
    arguments: list[Any] = sys.argv[1:]
    file, model, num_threads, log_format, log_level = arguments
    set_up_heap()
    configure_logging(log_format, log_level)

    def rank() -> int:
        serve(lambda: _parent(int(file)), pathlib.Path(model), int(num_threads))
        return 0

    run(rank)


def _parent(file: int) -> FoundLeader:
    from decoder_svc.runner.parallel.leader_search import FoundLeader
    from decoder_svc.runner.parallel.messages import Start, received

    connection = Connection(file)
    start = received(connection)
    assert isinstance(start, Start), "it is the first message"
    return FoundLeader(connection, None, start)


if __name__ == "__main__":
    main()
