"""Who waits, and who goes next.

Higher priority first. Within a priority, sequences that had already started go before new ones, oldest first (they hold
a client's open stream); new ones go round robin among clients, each client's own in order of arrival, so that a client
with many requests delays another by one turn, not by all of them.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Container, Iterator

from scheduler.core.sequence import Sequence


class _Level:
    """All that wait with one priority."""

    __slots__ = ("clients", "started")

    def __init__(self) -> None:
        self.started: list[Sequence] = []
        self.clients: OrderedDict[str, OrderedDict[int, Sequence]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self.started or self.clients)


class WaitingQueue:
    """A bounded-elsewhere queue with O(1) push, pop and removal among new sequences."""

    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}
        self._priorities: list[int] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sequence]:
        for priority in self._priorities:
            level = self._levels[-priority]
            yield from level.started
            for lane in level.clients.values():
                yield from lane.values()

    def push(self, sequence: Sequence) -> None:
        """Let a sequence wait; one that had started goes ahead of new ones."""
        level = self._levels.get(sequence.priority)
        if level is None:
            level = self._levels[sequence.priority] = _Level()
            insort(self._priorities, -sequence.priority)
        if sequence.started:
            insort(level.started, sequence, key=lambda waiting: waiting.arrival)
        else:
            lane = level.clients.setdefault(sequence.request.spec.client, OrderedDict())
            lane[sequence.sequence_id] = sequence
        self._size += 1

    def peek(self, skipped: Container[Sequence] = ()) -> Sequence | None:
        """Who goes next, those in `skipped` left out. O(1) without them."""
        return next((sequence for sequence in self if sequence not in skipped), None)

    def take(self, sequence: Sequence) -> None:
        """Take out a sequence because it goes; its client's turn is over. Raises KeyError if it does not wait."""
        self.remove(sequence)
        level = self._levels.get(sequence.priority)
        client = sequence.request.spec.client
        if level is not None and not sequence.started and client in level.clients:
            level.clients.move_to_end(client)

    def pop(self) -> Sequence:
        """Take who goes next. Raises IndexError when nobody waits."""
        sequence = self.peek()
        if sequence is None:
            raise IndexError("nobody waits")
        self.take(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence wherever it stands. Raises KeyError if it does not wait."""
        level = self._levels.get(sequence.priority)
        if level is None:
            raise KeyError(sequence.sequence_id)
        if sequence.started:
            try:
                level.started.remove(sequence)
            except ValueError:
                raise KeyError(sequence.sequence_id) from None
        else:
            client = sequence.request.spec.client
            lane = level.clients.get(client, OrderedDict())
            if sequence.sequence_id not in lane:
                raise KeyError(sequence.sequence_id)
            del lane[sequence.sequence_id]
            if not lane:
                del level.clients[client]
        self._size -= 1
        if not level:
            del self._levels[sequence.priority]
            self._priorities.remove(-sequence.priority)

    def check_integrity(self) -> None:
        """Raise AssertionError unless sizes agree and no level or lane is empty."""
        assert self._size == sum(1 for _ in self), "the queue's size is off"
        assert sorted(-priority for priority in self._levels) == self._priorities, "priorities out of step"
        for level in self._levels.values():
            assert level, "an empty level was kept"
            assert all(level.clients.values()), "an empty lane was kept"
