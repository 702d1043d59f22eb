"""One rank of a split model, in a process of its own. Only engines start it (RankProcesses).

It gets the decoder's settings from rank 0, loads its part of the model, and computes its part of each step until rank 0
ends.
"""

from __future__ import annotations

import logging
import os
import pathlib
import sys
from multiprocessing.connection import Connection

from decoder_svc.settings import DecoderSettings
from lookonce.errors import LookonceError
from lookonce.model.kernels.openmp import set_openmp_spin_count
from lookonce.model.lean_transformers import import_lean_transformers
from lookonce.process.garbage import long_lived_objects, settle
from lookonce.process.heap import set_up_heap
from lookonce.server.telemetry import configure_logging

logger = logging.getLogger(__name__)


def serve(connection: Connection) -> None:
    """Loads this rank's part of the model, says so, and runs steps. Raises what loading raises."""
    set_openmp_spin_count()
    # Imported here, because torch and transformers take seconds.
    with long_lived_objects():
        import_lean_transformers(shows_progress=False)
        from decoder_svc.assembly import load_rank
        from decoder_svc.device_choice import choose_device
        from decoder_svc.prompt.family import load_family
        from decoder_svc.runner.parallel.messages import Loaded, Start, encoded, received
        from decoder_svc.runner.parallel.rank_group import RankGroup
        from decoder_svc.runner.rank_steps import RankSteps
        from lookonce.model.model_folder import ModelFolder
        from lookonce.model.pretrained_tokenizer import load_pretrained

    start = received(connection)
    assert isinstance(start, Start), "it is the first message"
    settings = DecoderSettings(**start.settings)
    configure_logging(settings.log_format, settings.log_level)
    family = load_family(ModelFolder.open(settings.model), load_pretrained(settings.model))
    group = RankGroup(start.rank, start.size, pathlib.Path(start.meeting_file))
    runner = load_rank(settings, choose_device(settings), family, group)
    settle()
    connection.send_bytes(encoded(Loaded()))
    RankSteps(runner, group, connection).run()


def main() -> None:
    """Runs the process. Argument: the file descriptor of the connection to rank 0."""
    set_up_heap()
    status = 0
    try:
        serve(Connection(int(sys.argv[1])))
    except LookonceError as error:
        # Rank 0 finds the same, and tells it.
        logger.error("the rank does not start: %s", error)
        status = 1
    except Exception:
        logger.exception("the rank failed")
        status = 1
    # A step that hangs must not keep the process.
    os._exit(status)


if __name__ == "__main__":
    main()
