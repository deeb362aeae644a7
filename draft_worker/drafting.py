"""The drafting thread: brings mirrors up to date, guesses in rounds, hands out tails.

    inbox ──▶ mirrors ──▶ one round of the proposer, over the hungriest mirrors ──▶ tails ──▶ event loop
      ▲                                                                  │
      └───────────── nothing wanted: wait ◀──────────────────────────────┘

A round is one forward pass at most, so that a commit is never further away than that. An error of the proposer costs
the mirrors of its round; too many in a row end the process (`drafting.rounds`).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable

from cluster.draft_news import News, Tail
from cluster.logs import event
from draft_worker.inbox import Delivery, Inbox
from drafting.branching import best_forks
from drafting.mirror import Mirror
from drafting.mirrors import MirrorTable
from drafting.proposer import Proposer
from drafting.rounds import Rounds

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0

Tails = dict[int, list[Tail]]
"""by stream"""


class Drafter:
    """The thread's work, one round at a time; synchronous, so that tests can drive it."""

    def __init__(self, proposer: Proposer, mirrors: MirrorTable, num_branches: int = 0) -> None:
        """num_branches: most other continuations that are guessed of each sequence; 0: none."""
        self.proposer = proposer
        self._num_branches = num_branches
        self.mirrors = mirrors
        self._rounds = Rounds(proposer, mirrors)

    @property
    def num_guessed(self) -> int:
        """Tokens guessed so far."""
        return self._rounds.num_guessed

    @property
    def idle(self) -> bool:
        """Whether nothing is wanted until news come."""
        return not any(
            mirror.wanted > 0 or any(branch.wanted > 0 for branch in mirror.branches) for mirror in self.mirrors
        )

    def update(self, delivery: Delivery) -> Tails:
        """Apply what workers sent; the answers that can be given at once."""
        for stream in delivery.ended_streams:
            self._rounds.forget(self.mirrors.drop_stream(stream))
        for stream, worth in delivery.begun_streams.items():
            self.mirrors.begin_stream(stream, worth)
        for stream, news in delivery.news.items():
            self._rounds.forget(self.mirrors.apply(stream, news))
        # Every opening and commit is answered, be it with no tail at all, so that silence means trouble; at once,
        # unless the next rounds bring something to say.
        answers: Tails = {
            stream: []
            for stream, news in delivery.news.items()
            if (news.opens or news.commits) and not self._will_answer(stream, news)
        }
        return answers | self._tails(list(self.mirrors))

    def guess(self) -> Tails:
        """One round. Raises what `Rounds.run` does."""
        hungry = self.mirrors.hungry()
        if self._num_branches and not (hungry and hungry[0].urgent) and self._fork():
            hungry = self.mirrors.hungry()
        if not hungry:
            return {}
        failed = self._rounds.run(hungry)
        return {mirror.stream: [] for mirror in failed} if failed else self._tails(hungry)

    def _fork(self) -> bool:
        """Choose branches for the mirrors whose next draft is complete; whether there are new ones."""
        forked = False
        for mirror in self.mirrors:
            if mirror.forked or not (len(mirror.guess) > mirror.max_draft or mirror.wanted == 0):
                continue
            mirror.forked = True
            for index, token_id in best_forks(mirror, self.mirrors.odds, self._num_branches):
                branch = mirror.fork(index, token_id)
                if not self.proposer.fork(branch):
                    break
                mirror.branches.append(branch)
                forked = True
        return forked

    def _will_answer(self, stream: int, news: News) -> bool:
        """Whether some mirror of the news owes an answer and is to be guessed for."""
        slots = [opening.slot for opening in news.opens] + [commit.slot for commit in news.commits]
        mirrors = [self.mirrors.get(stream, slot) for slot in slots]
        return any(mirror is not None and mirror.owes and mirror.wanted > 0 for mirror in mirrors)

    def _tails(self, mirrors: list[Mirror]) -> Tails:
        tails: Tails = {}
        for mirror in mirrors:
            if mirror.wants_sending():
                tails.setdefault(mirror.stream, []).append(mirror.tail())
        return tails


class DraftThread:
    """Runs a Drafter on a thread of its own. The public methods are for the event loop."""

    def __init__(self, deliver: Callable[[int, list[Tail]], None]) -> None:
        """deliver(stream, tails) is called on the event loop."""
        self.inbox = Inbox()
        self.drafter: Drafter | None = None
        self._deliver = deliver
        self._thread: threading.Thread | None = None
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        """resolves when the thread ends, with the exception that ended it"""

    async def start(self, make: Callable[[], Drafter]) -> None:
        """Build the drafter on the thread, which owns it from then on; its exception is raised here."""
        built: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(make, built), name="draft", daemon=True)
        self._thread.start()
        await built

    async def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Wait until the running round and the thread have ended, or the time is over.

        An interpreter that ends while a thread is inside native code is aborted, and a stop in order ends as a crash.
        """
        self.inbox.stop()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, timeout_s)

    def _run(self, make: Callable[[], Drafter], built: asyncio.Future[None]) -> None:
        try:
            drafter = self.drafter = make()
        except BaseException as error:
            self._post(_resolve, built, error)
            return
        self._post(_resolve, built, None)
        try:
            while True:
                delivery = self.inbox.take(wait=drafter.idle)
                if delivery.stopped:
                    break
                self._hand_out(drafter.update(delivery))
                self._hand_out(drafter.guess())
        except BaseException as error:
            event(logger, "the drafting thread ended", level=logging.ERROR, error=error)
            self._post(_resolve, self.ended, error)
        else:
            self._post(_resolve, self.ended, None)

    def _hand_out(self, tails: Tails) -> None:
        for stream, of_stream in tails.items():
            self._post(self._deliver, stream, of_stream)

    def _post(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            # The loop is closed: the process is about to end and nobody listens.
            return


def _resolve(future: asyncio.Future[None], error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
