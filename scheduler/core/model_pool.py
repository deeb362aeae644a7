"""One model's queue and workers, and the cell's totals."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler.core.queue import WaitingQueue
from scheduler.core.sequence import Sequence
from scheduler.core.worker_state import WorkerState


@dataclass(slots=True)
class Counters:
    """Totals since the scheduler started."""

    requests_accepted: int = 0
    requests_finished: int = 0
    requests_cancelled: int = 0
    requests_failed: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0
    resumptions: int = 0
    fingerprint_crossings: int = 0
    evictions: int = 0


@dataclass(slots=True)
class ModelPool:
    """All that serves one model, and all that waits for it."""

    name: str
    queue: WaitingQueue = field(default_factory=WaitingQueue)
    suspects: list[Sequence] = field(default_factory=list)
    """wait apart, so that they hold nobody up: each was part of two crashes in a row; who goes first first"""
    parked: dict[int, Sequence] = field(default_factory=dict)
    """wait apart until a worker attaches: too large for each that serves now"""
    workers: dict[str, WorkerState] = field(default_factory=dict)
    num_held: int = 0
    """choices that wait for the first choice of their request"""
    seen: bool = False
    """a worker has served it"""

    @property
    def serving(self) -> list[WorkerState]:
        return [worker for worker in self.workers.values() if not worker.draining]

    @property
    def num_waiting(self) -> int:
        return len(self.queue) + len(self.suspects) + len(self.parked)

    @property
    def waiting(self) -> list[Sequence]:
        """All that wait, suspects first."""
        return [*self.suspects, *self.queue, *self.parked.values()]

    def unpark(self) -> None:
        """There is another worker: whoever was too large may not be any more."""
        parked, self.parked = self.parked, {}
        for sequence in parked.values():
            self.queue.push(sequence)
