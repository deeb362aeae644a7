"""What the worker has told a draft worker, and the tails it got back. No network; safe between two threads.

The executor's thread says what became known (`follow`, `forget`) and takes tails (`tail`); the link's loop takes what
is to be sent (`drain`) and brings tails in (`receive`). Each call holds the lock for microseconds. What is known of a
slot is in worker/followed.py.

Everything is bounded: a slot has one pending opening or one run of pending commits, which concatenate; a run beyond
MAX_PENDING_TOKENS drops the slot, which opens anew at its next row. So does a slot that no fresh tail has come for in
MAX_TOKENS_BEHIND tokens. At most MAX_OPENS_PER_DRAIN openings wait, since each costs the draft worker a prefill.

A slot whose rows may not draft costs nothing: it isn't opened, and of an open one nothing is told beyond the first such
row, so that the draft worker rests; after MAX_IDLE_ROWS it is closed. When a row may draft again, one commit tells all.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from math import inf

from cluster.draft_news import Close, Commit, News, Tail
from engine.prefix_hash import prefix_hash
from worker.followed import Followed, opening_of
from worker.sequences import Sequence

MAX_PENDING_TOKENS = 256
MAX_TOKENS_BEHIND = 128
MAX_OPENS_PER_DRAIN = 16
LATENCIES_KEPT = 32
MAX_IDLE_ROWS = 16
"""rows in a row without a draft budget after which a slot is closed"""
TOLD_IDLE_ROWS = 1
"""of these so many are still told: one step without drafts doesn't cost the next one its own"""


class TailTable:
    """See the module's text."""

    def __init__(self, lock: threading.Condition | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """lock: notified when tails come; the tables of a worker share one."""
        self.longest_draft = 0
        """slots open for drafts of at least so many tokens, so that a budget that rises opens none anew"""
        self.latencies: deque[float] = deque(maxlen=LATENCIES_KEPT)
        """seconds from a commit to its tail where a step has waited for it, infinite where none came until the next.
        Where no step waited, the target was in the draft worker's way, which says nothing of what a wait would bring"""
        self._lock = lock or threading.Condition()
        self._clock = clock
        self._followed: dict[int, Followed] = {}
        self._generations: dict[int, int] = {}
        self._closes: dict[int, Close] = {}
        self._dirty: set[int] = set()
        self._linked = False
        self._num_opening = 0

    # ------------------------------------------------------------------------------------- from the executor's thread

    def follow(self, sequence: Sequence, max_draft_tokens: int) -> None:
        """Tell what is known of a sequence: opens its slot if drafts are wanted, or commits the new tokens."""
        with self._lock:
            if not self._linked:
                return
            followed = self._followed.get(sequence.slot)
            if followed is not None and max_draft_tokens == 0:
                followed.idle_rows += 1
                if followed.idle_rows > MAX_IDLE_ROWS:
                    self._close(sequence.slot)
                    return
                if followed.idle_rows > TOLD_IDLE_ROWS and followed.opening is None:
                    return
            if followed is None or max_draft_tokens > followed.max_draft_tokens:
                if max_draft_tokens > 0 and self._num_opening < MAX_OPENS_PER_DRAIN:
                    self._open(sequence, max(max_draft_tokens, self.longest_draft))
                return
            if max_draft_tokens > 0:
                if followed.idle_rows > TOLD_IDLE_ROWS:
                    followed.tails = []  # none serves later than it may, however many steps it was not asked for
                followed.idle_rows = 0
            self._commit(followed, sequence)

    @property
    def has_news(self) -> bool:
        """Whether a drain would find something; may be wrong for a moment, either way."""
        return bool(self._dirty or self._closes)

    def forget(self, slot: int) -> None:
        """Stop following a slot."""
        with self._lock:
            if slot in self._followed:
                self._close(slot)

    def tail(self, slot: int, tokens: list[int], limit: int) -> list[int]:
        """The usable rest of the slot's tail after `tokens`, at most `limit` ids."""
        with self._lock:
            followed = self._followed.get(slot)
            return [] if followed is None else followed.rest(tokens, limit)

    def missing_since_s(self, slot: int, tokens: list[int]) -> float | None:
        """Where a step finds no tail: when the draft worker was told what it owes one for.

        None where there is a tail, and where waiting is vain (`Followed.owes`).
        """
        with self._lock:
            followed = self._followed.get(slot)
            if followed is None or not followed.owes:
                return None
            return None if followed.rest(tokens, 1) else followed.told_s

    def begin_wait(self, slot: int) -> None:
        """A step begins to wait for the slot's tail. What it learns of latencies is not of the first, long one."""
        with self._lock:
            followed = self._followed.get(slot)
            if followed is not None:
                followed.awaited = followed.answered

    def __contains__(self, slot: int) -> bool:
        return slot in self._followed

    def __len__(self) -> int:
        """Slots that are followed."""
        return len(self._followed)

    # --------------------------------------------------------------------------------------------- from the link's loop

    def link(self) -> None:
        """A fresh stream stands; slots open as their rows come."""
        with self._lock:
            self._reset()
            self._linked = True

    def unlink(self) -> None:
        """The stream is gone, and with it all that the draft worker knew."""
        with self._lock:
            self._reset()
            self._linked = False

    def drain(self) -> News:
        """Everything to send since the last drain."""
        with self._lock:
            closes, self._closes = list(self._closes.values()), {}
            opens, commits = [], []
            for slot in sorted(self._dirty):
                followed = self._followed.get(slot)
                if followed is None:
                    continue
                if followed.opening is not None:
                    opens.append(followed.opening)
                    followed.opening = None
                    followed.told_s = self._clock()
                elif followed.pending:
                    base, followed_hash = followed.pending_base, followed.hashes[-1]
                    commits.append(Commit(slot, followed.generation, base, followed.pending, followed_hash))
                    followed.pending = []
            self._dirty.clear()
            self._num_opening = 0
            return News(closes, opens, commits)

    def receive(self, tails: Iterable[Tail]) -> int:
        """Keep what fits; return how many did."""
        kept = 0
        with self._lock:
            for tail in tails:
                followed = self._followed.get(tail.slot)
                if followed is None or followed.opening is not None or tail.generation != followed.generation:
                    continue
                if followed.hash_at(tail.base) != tail.prefix_hash:
                    continue
                followed.keep(tail)
                followed.heard = max(followed.heard, tail.base)
                followed.silent_commits = 0
                kept += 1
                if followed.awaited and tail.base == followed.told:
                    followed.awaited = False
                    if tail.token_ids:
                        self.latencies.append(self._clock() - followed.told_s)
            if kept:
                self._lock.notify_all()
        return kept

    # ----------------------------------------------------------------------------------------------- with the lock held

    def _open(self, sequence: Sequence, max_draft_tokens: int) -> None:
        """Open, or open anew: a higher generation replaces the slot at the draft worker too."""
        slot = sequence.slot
        if slot in self._followed:
            self._close(slot)
        generation = self._generations.get(slot, 0) + 1
        self._generations[slot] = generation
        tokens = sequence.tokens
        self._followed[slot] = Followed(
            generation=generation,
            max_draft_tokens=max_draft_tokens,
            first_hashed=len(tokens),
            hashes=[prefix_hash(tokens)],
            opening=opening_of(sequence, generation, max_draft_tokens),
            heard=len(tokens),
        )
        self._num_opening += 1
        self._closes.pop(slot, None)
        self._dirty.add(slot)

    def _commit(self, followed: Followed, sequence: Sequence) -> None:
        new = sequence.tokens[followed.told :]
        if not new:
            return
        self._dirty.add(sequence.slot)
        if followed.opening is not None:
            # Nothing was sent yet: the opening simply carries more. Its list is ours alone.
            followed.opening.token_ids.extend(new)
            followed.learn(new)
            followed.heard = followed.told
            return
        if followed.awaited:
            self.latencies.append(inf)
        followed.awaited = False
        followed.note_commit()
        followed.told_s = self._clock()
        if not followed.pending:
            followed.pending_base = followed.told
        followed.pending.extend(new)
        followed.learn(new)
        behind = followed.told - followed.heard > MAX_TOKENS_BEHIND
        if len(followed.pending) > MAX_PENDING_TOKENS or behind:
            self._close(sequence.slot)

    def _close(self, slot: int) -> None:
        followed = self._followed.pop(slot)
        if followed.opening is None:
            self._closes[slot] = Close(slot, followed.generation)
        else:
            self._num_opening -= 1

    def _reset(self) -> None:
        self._lock.notify_all()  # nothing is to be waited for any more
        # Generations go on rising: a tail of an earlier stream can't be taken for one of this.
        self._followed.clear()
        self._closes.clear()
        self._dirty.clear()
        self._num_opening = 0
