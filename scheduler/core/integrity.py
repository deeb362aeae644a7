"""Conservation, checkably: every block, slot and sequence is in exactly one place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler.core.sequence import Sequence, State

if TYPE_CHECKING:
    from scheduler.core.scheduler import Scheduler


def check_integrity(scheduler: Scheduler) -> None:
    """Raise AssertionError unless blocks, slots, queues and requests all add up."""
    for worker in scheduler.workers.values():
        worker.check_integrity()
    queued: set[Sequence] = set()
    for pool in scheduler.models.values():
        pool.queue.check_integrity()
        for sequence in pool.waiting:
            assert sequence.state is State.WAITING, f"{sequence} is queued"
            assert not sequence.blocks, f"{sequence} waits with blocks"
            assert sequence.slot is None, f"{sequence} waits in a slot"
        queued.update(pool.waiting)
    placed = {one for worker in scheduler.workers.values() for one in worker.sequences}
    for request in scheduler.requests.values():
        assert request.sequences, "a request without live choices is kept"
        held = set(request.held)
        for sequence in request.sequences.values():
            places = (sequence in queued) + (sequence in placed) + (sequence in held)
            assert places == 1, f"{sequence} is in {places} places"
    live = {one for request in scheduler.requests.values() for one in request.sequences.values()}
    assert queued <= live, "a dead sequence waits"
    assert all(one.state is State.CLOSING for one in placed - live), "a dead sequence runs"
