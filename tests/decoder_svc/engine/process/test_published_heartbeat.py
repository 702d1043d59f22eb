"""A published heartbeat shows on the board what the service asks for."""

from __future__ import annotations

import math
import os
from typing import Any

from decoder_svc.engine.figures import EngineCounters, EngineLoad
from decoder_svc.engine.process.figure_board import FigureBoard
from decoder_svc.engine.process.published_heartbeat import PublishedHeartbeat

LOAD = EngineLoad(3, 0, 1, 0.5, 64, 0.25)
COUNTERS = EngineCounters(1, 2, 3, 4, 5, 6, 7)


class Core:
    """Stands for an engine with fixed figures."""

    def load(self, num_live_requests: int) -> EngineLoad:
        assert num_live_requests == 0, "the service knows its requests"
        return LOAD

    def counters(self) -> EngineCounters:
        return COUNTERS


def test_each_round_and_each_rest_are_on_the_board_with_load_and_sums() -> None:
    fd, board = FigureBoard.create()
    os.close(fd)
    heartbeat, core = PublishedHeartbeat(math.inf, board), Core()
    heartbeat.begin_round()
    assert board.round_began_s == heartbeat.began_s is not None
    assert board.load() == EngineLoad(0, 0, 0, 0.0, 0), "nobody is watched yet"
    watched: Any = core
    heartbeat.watch(watched)
    heartbeat.begin_round()
    assert (board.load(), board.counters(), board.round_began_s) == (LOAD, COUNTERS, heartbeat.began_s)
    heartbeat.rest()
    assert board.round_began_s is None
