"""The heartbeat of the engine thread in a process of its own, which the service reads from the board."""

from __future__ import annotations

from decoder_svc.engine.core import EngineCore
from decoder_svc.engine.heartbeat import Heartbeat
from decoder_svc.engine.process.figure_board import FigureBoard


class PublishedHeartbeat(Heartbeat):
    """Publishes each beginning of a step, and with it the engine's load and sums. Takes some microseconds."""

    def __init__(self, longest_round_s: float, board: FigureBoard) -> None:
        super().__init__(longest_round_s)
        self._board = board
        self._core: EngineCore | None = None

    def watch(self, core: EngineCore) -> None:
        """Sets the engine whose load and sums are published."""
        self._core = core

    def begin_round(self) -> None:
        """Ends the current round, if there is one, begins the next, and publishes this."""
        super().begin_round()
        self._publish()

    def rest(self) -> None:
        """Notes and publishes that the thread waits for work, which may take any time."""
        super().rest()
        self._publish()

    def _publish(self) -> None:
        if self._core is not None:
            self._board.publish(self._core.load(0), self._core.counters())
        self._board.publish_round(self.began_s)
