"""The gateways' sessions: what each still has to be told, and whose request is whose.

Output to a gateway is a map (request, choice) → pending news, drained by the session's own writer. The step loop only
adds to the map, so a gateway that reads slowly delays nobody and holds one message per choice, however long it stalls.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from scheduler import convert
from scheduler.core.step import Update

Key = tuple[str, int]
"""(gateway id, handle): names a request to the core"""


@dataclass(eq=False)
class Session:
    """One open session stream."""

    gateway_id: str
    models: Any = None
    """a ModelList still to be sent"""
    draining: bool = False
    """the cell refuses new requests"""
    asked_to_drain: bool = False
    gateway_draining: bool = False
    """it says so itself"""
    closed: bool = False
    _pending: dict[tuple[int, int], Any] = field(default_factory=dict)
    """(handle, choice) → Update, or the Status that ends a request"""
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def num_pending(self) -> int:
        """Choices with news that the stream's writer has not taken."""
        return len(self._pending)

    def add_update(self, handle: int, update: Update) -> None:
        """News of a choice."""
        key = (handle, update.sequence.choice)
        waiting = self._pending.get(key)
        self._pending[key] = update if waiting is None else waiting.followed_by(update)
        self._wake.set()

    def add_failure(self, handle: int, status: Any) -> None:
        """A request is over without an answer."""
        self.forget(handle)
        self._pending[(handle, -1)] = status
        self._wake.set()

    def set_models(self, models: Any, draining: bool) -> None:
        """What the cell serves has changed."""
        self.models, self.draining = models, draining
        self._wake.set()

    def forget(self, handle: int, choice: int | None = None) -> None:
        """Nobody waits for these news any more."""
        for key in [key for key in self._pending if key[0] == handle and choice in (None, key[1])]:
            del self._pending[key]

    def close(self) -> None:
        """End the stream after what is pending."""
        self.closed = True
        self._wake.set()

    async def next_response(self) -> Any | None:
        """Everything pending as one message; None once the session is closed and empty."""
        while not self._pending and self.models is None:
            if self.closed:
                return None
            self._wake.clear()
            await self._wake.wait()
        response = convert.session_response(self._pending, self.models, self.draining, self.asked_to_drain)
        self.models = None
        self._pending.clear()
        return response


@dataclass(frozen=True, slots=True)
class Owner:
    """Who sent a live request."""

    key: Key
    request_id: str
    attempt: int


class Ownership:
    """Live requests by the client's id, across all gateways."""

    def __init__(self) -> None:
        self._by_id: dict[str, Owner] = {}
        self._by_key: dict[Key, Owner] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def find(self, request_id: str) -> Owner | None:
        """Who holds the id now."""
        return self._by_id.get(request_id)

    def add(self, owner: Owner) -> None:
        """A request begins to live."""
        self._by_id[owner.request_id] = owner
        self._by_key[owner.key] = owner

    def remove(self, key: Key) -> None:
        """A request is over; unknown keys are ignored."""
        owner = self._by_key.pop(key, None)
        if owner is not None and self._by_id.get(owner.request_id) is owner:
            del self._by_id[owner.request_id]

    def of_gateway(self, gateway_id: str) -> list[Owner]:
        """Everything that a gateway has alive."""
        return [owner for owner in self._by_key.values() if owner.key[0] == gateway_id]
