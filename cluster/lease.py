"""Leadership terms.

A term fences: every internal message carries one, and a receiver drops lower ones. So a term must rise with each
leadership even when what was stored is lost (an emptied store, a scheduler restarted with embedded state) or a clock
was set back: it is the greatest of stored + 1, the wall clock in milliseconds, and one more than any term a peer has
shown.
"""

from __future__ import annotations


class MemoryLease:
    """The lease of a single scheduler: nobody else can hold it, so acquiring always succeeds."""

    def __init__(self) -> None:
        self._term = 0

    @property
    def term(self) -> int:
        """The latest term acquired; 0 before the first."""
        return self._term

    def acquire(self, highest_seen: int, now_ms: int) -> int:
        """A term above every earlier one and above `highest_seen`; `now_ms` is the wall clock, passed in."""
        self._term = max(self._term + 1, now_ms, highest_seen + 1)
        return self._term
