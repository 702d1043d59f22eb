"""`python -m decoder_svc.engine_worker`: the engine of a decoder in a process of its own. Only decoders start it.

It gets the decoder's settings through its pipe, loads the model, and runs steps until the decoder tells it to stop or
ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
from dataclasses import replace

from decoder_svc.engine.process.figure_board import FigureBoard
from decoder_svc.engine.process.pipe import Pipe
from decoder_svc.settings import DecoderSettings
from lookonce.errors import LookonceError
from lookonce.forgotten import Forgotten
from lookonce.model.kernels.openmp import set_openmp_spin_count
from lookonce.model.lean_transformers import import_lean_transformers
from lookonce.process.garbage import long_lived_objects, settle
from lookonce.process.heap import set_up_heap
from lookonce.server.telemetry import configure_logging

# Time that the current step gets to end once the decoder has told the engine to stop or has ended, seconds.
_STOP_TIMEOUT_S = 10.0
# prctl's option for the signal at the parent's death (linux/prctl.h).
_SET_PARENT_DEATH_SIGNAL = 1


def serve(pipe: Pipe, board: FigureBoard) -> None:
    """Loads the model and runs steps. Sends the reason through the pipe if the engine cannot start."""
    settings = DecoderSettings(**json.loads(pipe.receive()[0]))
    configure_logging(settings.log_format, settings.log_level)
    set_openmp_spin_count()
    # Imported here, because torch and transformers take seconds.
    with long_lived_objects():
        import_lean_transformers(shows_progress=settings.log_format != "json")
        from decoder_svc.assembly import choose_device, load_core
        from decoder_svc.engine.messages import Stop
        from decoder_svc.engine.process.codec import decode_in_process, encode_for_service, encode_start
        from decoder_svc.engine.process.published_heartbeat import PublishedHeartbeat
        from decoder_svc.service import load_text

    heartbeat = PublishedHeartbeat(settings.max_step_s, board)
    try:
        core = load_core(settings, choose_device(settings), load_text(settings).family, heartbeat)
    except LookonceError as error:
        pipe.send(encode_start(error))
        return
    settle()
    heartbeat.watch(core)
    pipe.send(encode_start(replace(core.facts, process_id=os.getpid())))
    core.start(lambda message: pipe.send(encode_for_service(message)))
    num_received = 0
    try:
        while True:
            message = decode_in_process(*pipe.receive())
            num_received += 1
            board.publish_received(num_received)
            if isinstance(message, Forgotten):
                core.put_forgotten(message)
            else:
                core.put(message)
    except (EOFError, OSError):
        # The decoder has ended, or has the engine's last message.
        core.put(Stop())
        core.join(_STOP_TIMEOUT_S)


def main() -> None:
    """Runs the engine process. Arguments: the file descriptors of the pipe and of the board."""
    pipe_fd, board_fd = map(int, sys.argv[1:])
    # Ctrl-C in a terminal reaches all processes of the group, but only the decoder may end this one.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    _end_with_parent()
    set_up_heap()
    serve(Pipe(socket.socket(fileno=pipe_fd)), FigureBoard(board_fd))
    # A step that hangs must not keep the process.
    os._exit(0)


def _end_with_parent() -> None:
    """Asks the kernel to kill this process when the decoder ends, also while the model is loaded."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


if __name__ == "__main__":
    main()
