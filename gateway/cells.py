"""Several cells behind one gateway: a session with each, and every live request in one of them.

Cells are found in the shared state, and come and go while the gateway runs. A new request goes where `gateway.routing`
says, among the cells that serve its model. A cell that has been away for `move_after_s` (its standbys, if it has any,
have had their chance) loses its requests to the others: each is submitted anew, with what it has emitted, so its client
sees a pause. While no other cell can take them they wait for their own; `Session` ends them in the end.

To the rest of the gateway this is one session (`Upstream`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from cluster.errors import Unavailable
from cluster.logs import event
from cluster.state import SchedulerEntry, State, search
from gateway.convert import ModelNews
from gateway.requests import LiveRequest, RequestTable
from gateway.routing import CellLoad, place, prefix_key
from gateway.session import Session

logger = logging.getLogger(__name__)

MAX_CELLS = 64


class Upstream(Protocol):
    """What takes the gateway's requests: a session with one cell, or several."""

    @property
    def up(self) -> bool: ...

    @property
    def draining(self) -> bool: ...

    async def wait_up(self, timeout_s: float) -> bool: ...

    def submit(self, request: LiveRequest) -> None: ...

    def cancel(self, request: LiveRequest) -> None: ...

    def begin_drain(self) -> None: ...

    def start(self) -> None: ...

    async def close(self) -> None: ...


OnModels = Callable[[Sequence[ModelNews]], None]
OpenSession = Callable[[str, OnModels, Callable[[], None]], Session]
"""Makes a session with the cell of that name, not yet started; it reports models and changes to the callbacks"""


class Cells:
    """All cells of a cluster. Everything happens on the event loop."""

    def __init__(
        self,
        state: State,
        open_session: OpenSession,
        table: RequestTable,
        on_models: OnModels,
        on_change: Callable[[], None],
        move_after_s: float,
    ) -> None:
        """`state`: ours to close. `on_models`, `on_change`: as a session has them, for all cells together."""
        self.sessions: dict[str, Session] = {}
        self._state = state
        self._open_session = open_session
        self._table = table
        self._on_models = on_models
        self._on_change = on_change
        self._move_after_s = move_after_s
        self._models: dict[str, Mapping[str, ModelNews]] = {}
        self._live: Counter[str] = Counter()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._news = asyncio.Event()
        self._searching: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Future[None]] = set()
        self._closed = False
        self._ending = False

    # ------------------------------------------------------------------------------------------- as one session

    @property
    def up(self) -> bool:
        """Whether any cell is there."""
        return any(session.up for session in self.sessions.values())

    @property
    def draining(self) -> bool:
        """Whether every cell that is there refuses new requests."""
        up = [session for session in self.sessions.values() if session.up]
        return bool(up) and all(session.draining for session in up)

    async def wait_up(self, timeout_s: float) -> bool:
        """Wait until any cell is there; False if none is after so long."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self.up:
                    await self._news.wait()
        except TimeoutError:
            return False
        return True

    def submit(self, request: LiveRequest) -> None:
        """Send a registered request to a cell."""
        self._assign(request, self._candidates(request.spec.model, ""))

    def cancel(self, request: LiveRequest) -> None:
        """Nobody waits for the request any more; it leaves the table next. Idempotent."""
        session = self.sessions.get(request.cell)
        if session is not None:
            session.cancel(request)
            self._live[request.cell] -= 1
            request.cell = ""

    def begin_drain(self) -> None:
        """Tell every cell that this gateway ends with its last request."""
        self._ending = True
        for session in self.sessions.values():
            session.begin_drain()

    def start(self) -> None:
        """Begin to look for cells, and keep doing so."""
        self._searching = asyncio.create_task(
            search(self._state, self._note_found, lambda: not self._closed), name="search for cells"
        )

    async def close(self) -> None:
        """End every session."""
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()
        if self._searching is not None:
            self._searching.cancel()
            await asyncio.gather(self._searching, return_exceptions=True)
        await asyncio.gather(*self._closing, *(session.close() for session in self.sessions.values()))
        await self._state.close()

    # ------------------------------------------------------------------------------------------------- placement

    def _candidates(self, model: str, without: str) -> list[CellLoad]:
        """The cells that could take a request now; better ones only, where there are any."""
        others = {name: session for name, session in self.sessions.items() if name != without and session.up}
        open_ones = [name for name, session in others.items() if not session.draining]
        serving = [name for name in open_ones if self._workers(name, model)]
        # Nobody serves the model now: it waits for a worker where it is let in at all.
        names = serving or open_ones or list(others)
        return [CellLoad(name, self._workers(name, model) or 1, self._live[name]) for name in names]

    def _workers(self, name: str, model: str) -> int:
        news = self._models.get(name, {}).get(model)
        return 0 if news is None else news.workers

    def _assign(self, request: LiveRequest, cells: Sequence[CellLoad]) -> None:
        spec = request.spec
        if cells:
            name = place(prefix_key(spec.model, spec.cache_salt, spec.prompt_token_ids), cells)
        elif self.sessions:
            name = next(iter(self.sessions))  # all are away; `_move` takes it from there
        else:
            request.fail(Unavailable("no cell can be reached", reason="NO_SCHEDULER"))
            return
        request.cell = name
        self._live[name] += 1
        self.sessions[name].submit(request)

    def _move(self, name: str) -> None:
        """A cell has been away for too long: what it had goes to the others, as far as they can take it."""
        self._timers.pop(name, None)
        session = self.sessions.get(name)
        if session is None or session.up:
            return
        moved = 0
        for request in self._table:
            if request.cell != name or request.finished:
                continue
            cells = self._candidates(request.spec.model, name)
            if cells:
                self._live[name] -= 1
                self._table.renew(request)
                self._assign(request, cells)
                moved += 1
        if moved:
            event(logger, "requests moved to other cells", level=logging.WARNING, lost=name, requests=moved)
        self._arm(name)

    def _arm(self, name: str) -> None:
        if name not in self._timers and not self._closed:
            self._timers[name] = asyncio.get_running_loop().call_later(self._move_after_s, self._move, name)

    # ------------------------------------------------------------------------------------------------ sessions

    def _note_models(self, name: str, models: Sequence[ModelNews]) -> None:
        self._models[name] = {model.name: model for model in models}
        self._on_models(merged(self._models.values()))

    def _note_change(self, name: str) -> None:
        session = self.sessions[name]
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()
        if not session.up:
            self._arm(name)
            self._note_models(name, ())
        news, self._news = self._news, asyncio.Event()
        news.set()
        self._on_change()

    def _note_found(self, entries: Sequence[SchedulerEntry]) -> None:
        self._keep({entry.cell for entry in entries})

    def _keep(self, names: set[str]) -> None:
        """Open sessions with new cells; cells that are gone, and have nothing of ours, are forgotten."""
        for name in sorted(names - self.sessions.keys()):
            if len(self.sessions) >= MAX_CELLS:
                event(logger, "too many cells", level=logging.WARNING, ignored=name)
                return
            event(logger, "cell found", cell=name)
            session = self._open_session(
                name,
                lambda models, name=name: self._note_models(name, models),  # type: ignore[misc]
                lambda name=name: self._note_change(name),  # type: ignore[misc]
            )
            self.sessions[name] = session
            if self._ending:
                session.begin_drain()
            self._arm(name)
            session.start()
        for name in sorted(self.sessions.keys() - names):
            if not self.sessions[name].up and self._live[name] <= 0:
                event(logger, "cell gone", cell=name)
                self._closing.add(closing := asyncio.ensure_future(self.sessions.pop(name).close()))
                closing.add_done_callback(self._closing.discard)
                self._models.pop(name, None)
                self._live.pop(name, None)
                timer = self._timers.pop(name, None)
                if timer is not None:
                    timer.cancel()


def merged(cells: Iterable[Mapping[str, ModelNews]]) -> list[ModelNews]:
    """The models of all cells as if they were one."""
    found: dict[str, ModelNews] = {}
    for models in cells:
        for news in models.values():
            old = found.get(news.name)
            found[news.name] = news if old is None else _sum(old, news)
    return list(found.values())


def _sum(one: ModelNews, other: ModelNews) -> ModelNews:
    """Limits are those of the roomiest cell, as they are those of the roomiest worker within a cell."""
    return ModelNews(
        one.name,
        one.workers + other.workers,
        max(one.max_model_len, other.max_model_len),
        max(one.vocab_size, other.vocab_size),
        max(one.max_sequence_tokens, other.max_sequence_tokens),
        tuple(sorted({*one.fingerprints, *other.fingerprints})),
    )
