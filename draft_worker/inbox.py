"""What workers sent and the drafting thread has not seen yet; bounded, because news of one slot merge.

MAX_SLOTS of a stream wait at most. Per stream and slot there is at most one closing, then at most one opening, then one
run of commits, which concatenate. A commit that does not continue what waits is a gap: it replaces the wait, and the
mirror finds the gap by its base.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from cluster.draft_news import Close, Commit, News, Open
from drafting.mirror import Worth

MAX_SLOTS = 4096


@dataclass(slots=True)
class _Slot:
    close: Close | None = None
    opening: Open | None = None
    commit: Commit | None = None


@dataclass(slots=True)
class Delivery:
    """Everything that waited."""

    begun_streams: dict[int, Worth] = field(default_factory=dict)
    """how far guesses for them go"""
    news: dict[int, News] = field(default_factory=dict)
    """by stream"""
    ended_streams: list[int] = field(default_factory=list)
    stopped: bool = False


class Inbox:
    """Written by the event loop, emptied by the drafting thread."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._waiting: dict[int, dict[int, _Slot]] = {}
        self._begun: dict[int, Worth] = {}
        self._ended: list[int] = []
        self._stopped = False

    def begin_stream(self, stream: int, worth: Worth) -> None:
        """A worker has come; its first news wake the drafting thread."""
        with self._condition:
            self._begun[stream] = worth

    def put(self, stream: int, news: News) -> None:
        """Add a worker's news."""
        with self._condition:
            slots = self._waiting.setdefault(stream, {})
            for close in news.closes:
                if _has_room(slots, close.slot):
                    slots[close.slot] = _Slot(close=close)
            for opening in news.opens:
                if _has_room(slots, opening.slot):
                    slot = slots.setdefault(opening.slot, _Slot())
                    slot.opening, slot.commit = opening, None
            for commit in news.commits:
                if _has_room(slots, commit.slot):
                    slot = slots.setdefault(commit.slot, _Slot())
                    slot.commit = _merged(slot.commit, commit)
            self._condition.notify()

    def end_stream(self, stream: int) -> None:
        """A worker is gone."""
        with self._condition:
            self._waiting.pop(stream, None)
            self._begun.pop(stream, None)
            self._ended.append(stream)
            self._condition.notify()

    def stop(self) -> None:
        """Tell the drafting thread to end."""
        with self._condition:
            self._stopped = True
            self._condition.notify()

    def take(self, wait: bool) -> Delivery:
        """Everything so far; with `wait`, not before there is something."""
        with self._condition:
            while wait and not (self._waiting or self._ended or self._stopped):
                self._condition.wait()
            waiting, self._waiting = self._waiting, {}
            begun, self._begun = self._begun, {}
            ended, self._ended = self._ended, []
            news = {stream: _news(slots) for stream, slots in waiting.items()}
            return Delivery(begun, news, ended, self._stopped)


def _has_room(slots: dict[int, _Slot], slot: int) -> bool:
    """News of a slot that is dropped leave a gap, which its mirror notices and its worker after it."""
    return slot in slots or len(slots) < MAX_SLOTS


def _merged(before: Commit | None, commit: Commit) -> Commit:
    if before is None or before.generation != commit.generation or before.base + len(before.token_ids) != commit.base:
        return commit
    tokens = [*before.token_ids, *commit.token_ids]
    return Commit(commit.slot, commit.generation, before.base, tokens, commit.prefix_hash)


def _news(slots: dict[int, _Slot]) -> News:
    return News(
        closes=[slot.close for slot in slots.values() if slot.close is not None],
        opens=[slot.opening for slot in slots.values() if slot.opening is not None],
        commits=[slot.commit for slot in slots.values() if slot.commit is not None],
    )
