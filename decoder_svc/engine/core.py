"""The interface of the part of the engine that runs steps: a thread of this process, or a process of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from decoder_svc.engine.figures import EngineCounters, EngineLimits, EngineLoad
from decoder_svc.engine.messages import Abort, ChangeAdapter, FailedRows, Stop, ToEventLoop
from decoder_svc.rows.fetched_rows import FetchedRows
from decoder_svc.scheduling.request import Request
from lookonce.forgotten import Forgotten
from lookonce.model.kernels.kernel_choice import KernelChoice


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Constants of an engine with a loaded model."""

    limits: EngineLimits
    # Name of the attention implementation.
    attention_backend: str
    # Bytes that the language model's weights take on the device.
    weight_bytes: int
    # The implementations that a trial has chosen, by operation.
    kernel_choices: tuple[KernelChoice, ...] = ()
    # The LoRA adapters that it was started with: their fingerprints, by their names.
    adapters: Mapping[str, str] = field(default_factory=dict)
    # Id of the engine's process; None: a thread of the service.
    process_id: int | None = None


class EngineCore(ABC):
    """Scheduler and runner with a loaded model. It takes messages in any order of threads, and posts its own.

    After `Stop`, or when it fails, it posts one `Ended` and nothing more.
    """

    facts: EngineFacts

    @abstractmethod
    def start(self, post: Callable[[ToEventLoop], None]) -> None:
        """Begins to run steps. `post` gets each message of the engine, always on the same thread; it must not block."""

    @abstractmethod
    def put(self, message: Request | FetchedRows | FailedRows | Abort | ChangeAdapter | Stop) -> None:
        """Sends a message to the engine. Never blocks; any thread may call it."""

    @abstractmethod
    def put_forgotten(self, forgotten: Forgotten) -> None:
        """Sends images to forget to the engine. Never blocks; any thread may call it."""

    @abstractmethod
    def join(self, timeout_s: float | None = None) -> bool:
        """Waits until the engine has ended; returns False when `timeout_s` seconds are over first."""

    @abstractmethod
    def close(self) -> None:
        """Frees what can be freed, whether or not the engine has ended."""

    @property
    @abstractmethod
    def is_healthy(self) -> bool:
        """Whether the engine runs and no step hangs."""

    @property
    @abstractmethod
    def has_died(self) -> bool:
        """Whether the engine ended on an error: only a new process of the service helps."""

    @property
    @abstractmethod
    def round_s(self) -> float:
        """Age of the current step with its messages, seconds; 0 while the engine waits for work."""

    @abstractmethod
    def load(self, num_live_requests: int) -> EngineLoad:
        """Returns the current load, given the number of requests that have no terminal answer yet."""

    @abstractmethod
    def counters(self) -> EngineCounters:
        """Returns the sums since the start."""
