"""`python -m decoder_svc.remote_rank`: settings → rank 0 → this rank's part of the model → steps, until rank 0 ends.

SIGTERM or SIGINT ends it while it waits for rank 0. Later, rank 0 is told to end as well, and drains, for which it
needs its ranks: this one goes on until rank 0 has ended. A second signal ends it at once.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from types import FrameType
from typing import TYPE_CHECKING

from decoder_svc.rank_worker import run, serve
from decoder_svc.runner.parallel.rank_handshake import read_key
from decoder_svc.settings import RankSettings
from lookonce import __version__
from lookonce.errors import LookonceError
from lookonce.local.serve_extra import require_serve_packages
from lookonce.model.model_folder import ModelFolder
from lookonce.process.end_signals import END_SIGNALS, end_by
from lookonce.process.heap import set_up_heap
from lookonce.server.settings_parser import exit_with, parse_settings
from lookonce.server.telemetry import configure_logging

if TYPE_CHECKING:
    from decoder_svc.runner.parallel.leader_search import FoundLeader

logger = logging.getLogger(__name__)

# Time that a step gets to notice that rank 0 has ended, seconds. Its tensors may wait for one that has vanished.
_LAST_STEP_S = 10.0
_LOOK_S = 0.5
_is_told = threading.Event()


def main() -> None:
    """Runs the rank with the flags of the command line, and ends the process."""
    try:
        require_serve_packages("lookonce serve rank")
        settings = parse_settings(RankSettings, sys.argv[1:], "lookonce serve rank")
        configure_logging(settings.log_format, settings.log_level)
        folder = ModelFolder.open(settings.model)
        key = read_key(settings.rank_key_file)
    except LookonceError as error:
        exit_with(error)
    set_up_heap()
    for number in END_SIGNALS:
        end_by(number)

    def find() -> FoundLeader:
        from decoder_svc.runner.parallel.leader_search import find_leader
        from decoder_svc.runner.parallel.model_digest import model_digest

        host, _, port = settings.leader.rpartition(":")
        found = find_leader(host.strip("[]"), int(port), key, __version__, model_digest(folder))
        for number in END_SIGNALS:
            signal.signal(number, _wait_for_leader)
        threading.Thread(target=_end_with, args=(found.connection,), name="leader-watch", daemon=True).start()
        return found

    def rank() -> int:
        serve(find, settings.model, settings.num_threads)
        logger.info("the decoder has ended, and so does this rank")
        # A supervisor starts it again if nobody has told it to end.
        return 0 if _is_told.is_set() else 1

    run(rank)


def _wait_for_leader(number: int, _: FrameType | None) -> None:
    logger.info("told to end; this rank goes on until the decoder has ended")
    _is_told.set()
    end_by(number)


def _end_with(connection: Connection) -> None:
    from decoder_svc.runner.parallel.other_ranks import has_hung_up

    while not has_hung_up([connection], _LOOK_S):
        pass
    time.sleep(_LAST_STEP_S)
    logger.error("the decoder has ended or cannot be reached, and this rank hangs in a step; it ends")
    os._exit(1)


if __name__ == "__main__":
    main()
