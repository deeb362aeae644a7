"""The gateways' sessions: what each still has to be told, and whose request is whose.

Output to a gateway is a map (request, choice) → pending news, from which the stream's sending side takes everything
once a turn. The step loop only adds to the map, so a gateway that reads slowly delays nobody and holds one message per
choice, however long it stalls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
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
    _told: bool = False
    """`on_news` is about to be called"""

    def __post_init__(self) -> None:
        self.on_news: Callable[[], None] = lambda: None
        """called at the end of a turn of the loop in which something came up, or the session ended"""

    @property
    def num_pending(self) -> int:
        """Choices with news that the stream's writer has not taken."""
        return len(self._pending)

    def add_update(self, handle: int, update: Update) -> None:
        """News of a choice."""
        key = (handle, update.sequence.choice)
        waiting = self._pending.get(key)
        self._pending[key] = update if waiting is None else waiting.followed_by(update)
        self._tell()

    def add_failure(self, handle: int, status: Any) -> None:
        """A request is over without an answer."""
        self.forget(handle)
        self._pending[(handle, -1)] = status
        self._tell()

    def set_models(self, models: Any, draining: bool) -> None:
        """What the cell serves has changed."""
        self.models, self.draining = models, draining
        self._tell()

    def forget(self, handle: int, choice: int | None = None) -> None:
        """Nobody waits for these news any more."""
        for key in [key for key in self._pending if key[0] == handle and choice in (None, key[1])]:
            del self._pending[key]

    def close(self) -> None:
        """End the stream after what is pending."""
        self.closed = True
        self._tell()

    @property
    def has_more(self) -> bool:
        """Whether `next_message` has one."""
        return bool(self._pending) or self.models is not None

    def next_message(self) -> Any | None:
        """Everything pending as one message; None where nothing is."""
        if not self.has_more:
            return None
        response = convert.session_response(self._pending, self.models, self.draining, self.asked_to_drain)
        self.models = None
        self._pending.clear()
        return response

    def _tell(self) -> None:
        if not self._told:
            self._told = True
            asyncio.get_running_loop().call_soon(self._tell_now)

    def _tell_now(self) -> None:
        self._told = False
        self.on_news()


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
