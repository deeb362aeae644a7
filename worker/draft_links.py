"""The worker's links to all its draft workers: shares sequences out among them, and waits for late tails where it pays.

                          ┌─▶ link, its slots ──▶ draft worker
    executor ──▶ links ───┼─▶ link, its slots ──▶ draft worker        a slot belongs to one link at a time
                          └─▶ …

A sequence that is to be followed goes to the linked draft worker that has the fewest of this worker's slots; among
equals its rendezvous hash decides, so that workers with a sequence each don't meet at one draft worker. When a link
breaks, its slots move at their next row. At most MAX_LINKS draft workers are linked, the ones with the highest hashes.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from hashlib import blake2b
from typing import NamedTuple

from worker.drafting import DraftLink
from worker.patience import LONGEST_S, LOST_ON_SHARED_CORES, Exploration, Late, Pace, wait_s
from worker.profile import StepTimes, added_s
from worker.sequences import Sequence
from worker.steps import StepOutcome

MAX_LINKS = 8


class _Missing(NamedTuple):
    """A row of a step without a tail."""

    link: DraftLink
    sequence: Sequence
    max_draft: int
    since_s: float
    """when its draft worker was told what it owes the tail for"""

    @property
    def is_awaited(self) -> bool:
        tails, sequence = self.link.tails, self.sequence
        return self.link.drafting and tails.missing_since_s(sequence.slot, sequence.tokens) is not None


class DraftLinks:
    """See the module's text. The executor's thread calls the methods of executor.Drafting, the event loop the rest."""

    def __init__(
        self,
        *,
        worker_id: str,
        model: str,
        vocab_size: int,
        cores: str = "",
        stall_s: float = 2.0,
        on_change: Callable[[], None] = lambda: None,
        longest_wait_s: float = LONGEST_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """cores: which ones the target computes on; empty: it has a device of its own.

        on_change: called when drafts can be had and could not before, or the reverse.
        """
        self.longest_draft = 0
        """slots open for drafts of at least so many tokens; see TailTable"""
        self.step_times: StepTimes = []
        """T(n) as measured at the start; empty: verification is thought to cost nothing"""
        self.waited_s = 0.0
        """by all steps together"""
        self._worker_id = worker_id
        self._model = model
        self._vocab_size = vocab_size
        self._cores = cores
        self._stall_s = stall_s
        self._on_change = on_change
        self._longest_wait_s = longest_wait_s
        self._clock = clock
        self._arrived = threading.Condition()
        self._links: dict[str, DraftLink] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._running = False
        self._was_drafting = False
        self._of_slot: dict[int, DraftLink] = {}
        self._pace = Pace()
        self._exploration = Exploration()
        self._came_late: set[int] = set()
        """slots whose tails the running step has waited for, and got"""

    # ------------------------------------------------------------------------------------- from the executor's thread

    def tail(self, slot: int, tokens: list[int], limit: int) -> list[int]:
        """See executor.Drafting."""
        link = self._of_slot.get(slot)
        return [] if link is None else link.tail(slot, tokens, limit)

    def follow(self, sequence: Sequence, max_draft_tokens: int) -> None:
        """See executor.Drafting."""
        slot = sequence.slot
        link = self._of_slot.get(slot)
        if link is None and max_draft_tokens == 0:
            return
        if link is None or not (link.drafting and slot in link.tails):
            self._of_slot.pop(slot, None)
            if max_draft_tokens == 0 or (link := self._choose(sequence.sequence_id)) is None:
                return
            self._of_slot[slot] = link
            link.tails.longest_draft = self.longest_draft
        link.follow(sequence, max_draft_tokens)

    def forget(self, slot: int) -> None:
        """See executor.Drafting."""
        link = self._of_slot.pop(slot, None)
        if link is not None:
            link.forget(slot)

    def flush(self) -> None:
        """See executor.Drafting."""
        for link in self._linked():
            link.flush()

    def wait(self, rows: Seq[tuple[Sequence, int]], before: Callable[[], None]) -> None:
        """See executor.Drafting."""
        if not self._of_slot or self._longest_wait_s <= 0:
            return
        now_s = self._clock()
        self._came_late.clear()
        missing = self._missing(rows)
        late = self._late(missing, len(rows), now_s)
        rate = self._pace.tokens_per_s
        shared = all(one.link.shares_cores for one in missing)
        delta_s = wait_s(late, rate * LOST_ON_SHARED_CORES if shared else rate, self._longest_wait_s)
        exploring = delta_s <= 0
        if exploring:
            delta_s = self._exploration.wait_s(late, rate, self._longest_wait_s)
        if delta_s <= 0:
            return
        for one in missing:
            one.link.tails.begin_wait(one.sequence.slot)
        before()
        with self._arrived:
            self._arrived.wait_for(lambda: not any(one.is_awaited for one in missing), delta_s)
        self._came_late = {
            one.sequence.slot
            for one in missing
            if one.link.drafting and one.link.tail(one.sequence.slot, one.sequence.tokens, 1)
        }
        spent_s = self._clock() - now_s
        self.waited_s += spent_s
        if exploring:
            self._exploration.explored(spent_s, bool(self._came_late))
        else:
            self._exploration.waited()

    def learn(self, outcome: StepOutcome) -> None:
        """See executor.Drafting."""
        self._pace.observe(len(outcome.token_ids), outcome.duration_s)
        if self._came_late:
            rows = zip(outcome.slots, outcome.num_drafted_tokens, outcome.num_accepted_tokens, strict=True)
            late = [(drafted, accepted) for slot, drafted, accepted in rows if drafted and slot in self._came_late]
            self._came_late.clear()
            self._pace.observe_late(len(late), sum(drafted for drafted, _ in late), sum(right for _, right in late))
        self._exploration.step(outcome.duration_s, self._longest_wait_s)

    def _missing(self, rows: Seq[tuple[Sequence, int]]) -> list[_Missing]:
        """Rows whose draft worker owes a tail."""
        found = []
        for sequence, k in rows:
            link = self._of_slot.get(sequence.slot)
            since_s = None if link is None else link.tails.missing_since_s(sequence.slot, sequence.tokens)
            if link is not None and since_s is not None:
                found.append(_Missing(link, sequence, k, since_s))
        return found

    def _late(self, missing: list[_Missing], num_rows: int, now_s: float) -> list[Late]:
        """What each of them would bring; all bear alike what verification costs them together."""
        if not missing:
            return []
        pace = self._pace
        drafted = sum(min(pace.drafted, one.max_draft) for one in missing)
        cost = pace.tokens_per_s * added_s(self.step_times, num_rows, drafted) / len(missing)
        latencies = {one.link: tuple(one.link.tails.latencies) for one in missing}
        return [
            Late(now_s - one.since_s, min(pace.accepted, one.max_draft) - cost, latencies[one.link]) for one in missing
        ]

    def _choose(self, sequence_id: int) -> DraftLink | None:
        linked = self._linked()
        if len(linked) < 2:
            return linked[0] if linked else None
        return min(linked, key=lambda link: (len(link.tails), -rendezvous(self._worker_id, link.address, sequence_id)))

    def _linked(self) -> list[DraftLink]:
        # A copy in one call: the event loop may change the dictionary meanwhile.
        return [link for link in tuple(self._links.values()) if link.drafting]

    # ----------------------------------------------------------------------------------------------- on the event loop

    @property
    def drafting(self) -> bool:
        """Whether drafts can be had."""
        return any(link.drafting for link in self._links.values())

    def set_addresses(self, addresses: Seq[str]) -> None:
        """Where draft workers are now. A link to one that is no longer listed ends."""
        ranked = sorted(set(addresses), key=lambda address: -rendezvous(self._worker_id, address))
        wanted = ranked[:MAX_LINKS]
        for address in set(self._links) - set(wanted):
            task = self._tasks.pop(address, None)
            if task is not None:
                task.cancel()
            self._links.pop(address).close()
        for address in wanted:
            if address not in self._links:
                self._links[address] = self._make(address)
                if self._running:
                    self._tasks[address] = asyncio.ensure_future(self._links[address].run())
        self._note_change()

    async def run(self) -> None:
        """Keep the links; until cancelled."""
        self._running = True
        self._tasks = {address: asyncio.ensure_future(link.run()) for address, link in self._links.items()}
        try:
            await asyncio.Event().wait()
        finally:
            tasks, self._tasks = list(self._tasks.values()), {}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _make(self, address: str) -> DraftLink:
        return DraftLink(
            address,
            worker_id=self._worker_id,
            model=self._model,
            vocab_size=self._vocab_size,
            cores=self._cores,
            stall_s=self._stall_s,
            on_change=self._note_change,
            arrived=self._arrived,
        )

    def _note_change(self) -> None:
        if self.drafting != self._was_drafting:
            self._was_drafting = self.drafting
            self._on_change()


def rendezvous(*names: object) -> int:
    """A hash that everybody computes alike; who ranks highest for a key changes only when that one goes."""
    return int.from_bytes(blake2b("\0".join(map(str, names)).encode(), digest_size=8).digest(), "big")
