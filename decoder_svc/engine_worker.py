"""The engine of a decoder in a process of its own. Only decoders start it (EngineProcess).

It gets the decoder's settings through its pipe, loads the model, and runs steps until the decoder tells it to stop or
ends.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import socket
import sys
import threading
import time
from dataclasses import replace

from decoder_svc.engine.process.figure_board import FigureBoard
from decoder_svc.engine.process.pipe import Pipe
from decoder_svc.settings import DecoderSettings
from lookonce.errors import LookonceError
from lookonce.forgotten import Forgotten
from lookonce.model.kernels.openmp import set_openmp_spin_count
from lookonce.model.libraries.lean_transformers import import_lean_transformers
from lookonce.model.model_folder import ModelFolder, needs_torchvision
from lookonce.process.garbage import long_lived_objects, settle
from lookonce.process.heap import set_up_heap
from lookonce.server.telemetry import configure_logging

logger = logging.getLogger(__name__)

# Time that the current step gets to end once the decoder has told the engine to stop or has ended, seconds.
_STOP_TIMEOUT_S = 10.0
# Pause between two signs of life, seconds.
_LIFE_S = 0.5


def serve(pipe: Pipe, board: FigureBoard) -> None:
    """Loads the model and runs steps. Sends the reason through the pipe if the engine refuses to start."""
    settings = DecoderSettings(**json.loads(pipe.receive()[0]))
    configure_logging(settings.log_format, settings.log_level)
    set_openmp_spin_count()
    # Imported here, because torch and transformers take seconds.
    with long_lived_objects():
        import_lean_transformers(
            needs_torchvision=needs_torchvision(settings.model), shows_progress=settings.log_format != "json"
        )
        from decoder_svc.assembly import load_core
        from decoder_svc.constraint.folder_vocabulary import folder_vocabulary
        from decoder_svc.device_choice import choose_device
        from decoder_svc.engine.messages import Stop
        from decoder_svc.engine.process.codec import decode_in_process, encode_for_service, encode_start
        from decoder_svc.engine.process.published_heartbeat import PublishedHeartbeat
        from decoder_svc.prompt.family import load_family
        from lookonce.model.pretrained_tokenizer import load_pretrained

    heartbeat = PublishedHeartbeat(settings.max_step_s, board)
    try:
        family = load_family(ModelFolder.open(settings.model), load_pretrained(settings.model))
        load_vocabulary = functools.partial(folder_vocabulary, settings.model)
        core = load_core(settings, choose_device(settings), family, heartbeat, load_vocabulary)
    except LookonceError as error:
        pipe.send(encode_start(error))
        return
    settle()
    heartbeat.watch(core)
    board.publish_life(time.monotonic())
    threading.Thread(target=_show_life, args=(board,), name="life", daemon=True).start()
    pipe.send(encode_start(replace(core.facts, process_id=os.getpid())))
    core.start(lambda message: pipe.send(encode_for_service(message)))
    try:
        while True:
            message = decode_in_process(*pipe.receive())
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
    set_up_heap()
    status = 0
    try:
        serve(Pipe(socket.socket(fileno=pipe_fd)), FigureBoard(board_fd))
    except Exception:
        logger.exception("the engine process failed")
        status = 1
    # A step that hangs must not keep the process.
    os._exit(status)


def _show_life(board: FigureBoard) -> None:
    """Shows the decoder again and again that this process runs, also while it has no work."""
    while True:
        board.publish_life(time.monotonic())
        time.sleep(_LIFE_S)


if __name__ == "__main__":
    main()
