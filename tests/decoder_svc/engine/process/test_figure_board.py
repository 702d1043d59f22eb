"""A board shows in one process the numbers that another process publishes."""

from __future__ import annotations

import os
import time

from decoder_svc.engine.figures import EngineCounters, EngineLoad
from decoder_svc.engine.process.figure_board import FigureBoard

LOAD = EngineLoad(3, 2, 1, 0.25, 64, 0.125)
COUNTERS = EngineCounters(1, 2, 3, 4, 5, 6, 7)


def test_a_new_board_shows_an_engine_at_rest() -> None:
    fd, board = FigureBoard.create()
    os.close(fd)
    assert board.round_began_s is None
    assert 0 < board.alive_s <= time.monotonic()
    assert board.load() == EngineLoad(0, 0, 0, 0.0, 0, 0.0)
    assert board.counters() == EngineCounters(0, 0, 0)


def test_another_view_shows_what_was_published() -> None:
    fd, board = FigureBoard.create()
    other = FigureBoard(fd)
    os.close(fd)
    other.publish(LOAD, COUNTERS)
    other.publish_round(12.5)
    other.publish_life(99.5)
    assert (board.load(), board.counters()) == (LOAD, COUNTERS)
    assert all(isinstance(number, int) for number in (board.load().running_requests, board.counters().stalls))
    assert (board.round_began_s, board.alive_s) == (12.5, 99.5)
    other.publish_round(None)
    assert board.round_began_s is None
