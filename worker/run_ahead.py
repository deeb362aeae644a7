"""Steps that are launched before anybody knows what came of the one before.

The scheduler issues step n + 1 before it has n's outcome, and a decode row of it names neither token nor length. Where
the engine can (`engine.batch.AheadEngine`), such a step is put on the device behind n at once:

    step thread    launch n │ launch n + 1 │       land n │ launch n + 2 │       land n + 1 │ …
    device         [ step n                      ][ step n + 1                  ][ step n + 2 …
    loop thread                                      outcome n → scheduler → step n + 2

*Launching* plans the rows and stages their inputs. What n will make of a sequence is known but for one token's id: a
row that samples lengthens it by one (`Sequence.awaited`). *Landing* takes the tokens and settles the step; steps land
in order, and nothing but a launch happens between.

A step is launched only if no row of it needs the host between the two: no draft is to be had for it, its token depends
on its own logits and noise alone (no penalty, ban, bias or cut, no log-probabilities). Any other step runs when all
before it have landed. A step goes one way or the other as a whole: to launch some of its rows would read the weights
twice, which costs a device more than waiting for the host.

    ended in n, launched in n + 1    its row of n + 1 is dropped. It has written one token's KV, at the sequence's
                                     `computed`, which nobody counts as valid; its blocks are its own until the
                                     scheduler has applied n + 1, the last step that contains it
    left its slot in n + 1           n settles the sequence all the same: the plan holds it, not the slot
    failed in n (no token)           as ended; the id that was fed instead is of no account
    the launch raised                the step is computed when it lands, row by row if need be, like any other
    the device raised                all that is in flight is waited out, and then computed again in order, as above; if
                                     a sequence has left its slot by then, the engine counts as broken
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.logs import event
from engine.batch import AheadEngine, Pending
from engine.sampler import sampled_tokens
from worker.batching import RowPlan, launched_rows
from worker.settlement import Settlement
from worker.steps import Step, StepOutcome

if TYPE_CHECKING:
    from worker.executor import Executor

logger = logging.getLogger(__name__)

MAX_IN_FLIGHT = 2
"""launched steps; as many as an engine takes"""


@dataclass(slots=True, eq=False)
class Launched:
    """A step on the device."""

    settlement: Settlement
    plans: list[RowPlan]
    pending: Pending | None
    """None: there is nothing to compute, or it is computed when the step lands"""
    began_s: float

    @property
    def is_late(self) -> bool:
        """Whether it has yet to be computed."""
        return self.pending is None and bool(self.plans)

    def wait(self) -> None:
        """Return when its tokens are there, or never will be. From any thread; errors are told when it lands."""
        if self.pending is not None:
            with suppress(Exception):
                self.pending.wait()


class RunAhead:
    """See the module's text. The executor's thread owns it."""

    def __init__(self, executor: Executor, engine: AheadEngine, clock: Callable[[], float]) -> None:
        self._executor = executor
        self._engine = engine
        self._clock = clock
        self._in_flight: deque[Launched] = deque()
        self._last_landed_s = 0.0

    @property
    def num_in_flight(self) -> int:
        """Steps that were launched and have not landed."""
        return len(self._in_flight)

    def can_launch(self, step: Step) -> bool:
        """Whether it may go behind what is in flight; see the module's text."""
        if not step.slots or len(self._in_flight) >= MAX_IN_FLIGHT or any(one.is_late for one in self._in_flight):
            return False
        admitted = {admission.slot: admission.params for admission in step.admissions}
        sequences = self._executor.sequences
        for slot, num_prefill, max_draft in zip(
            step.slots, step.num_prefill_tokens, step.max_draft_tokens, strict=True
        ):
            if max_draft and not num_prefill:
                return False
            params = admitted.get(slot)
            if params is None:
                sequence = sequences.get(slot)
                if sequence is None or sequence.ended:
                    continue
                params = sequence.params
            if not params.only_chooses:
                return False
        return True

    def launch(self, step: Step) -> Launched:
        """Put a step that `can_launch` on the device."""
        began_s = self._clock()
        executor, settlement = self._executor, Settlement(step)
        executor.apply_slots(step)
        plans = executor.plan(step, settlement)
        executor.drafting.flush()
        launched = Launched(settlement, plans, self._put_on_device(plans) if plans else None, began_s)
        self._in_flight.append(launched)
        return launched

    def land(self) -> StepOutcome:
        """Wait for the oldest step's tokens and settle it. Raises EngineBroken as `Executor.run` does."""
        launched = self._in_flight.popleft()
        token_ids = self._tokens_of(launched)
        executor, settlement = self._executor, launched.settlement
        live = [plan for plan in launched.plans if not plan.sequence.ended]
        if token_ids is None:
            executor.compute_late(live, settlement)
        else:
            kept: list[int] = []
            at = 0
            for plan in launched.plans:
                if not plan.sequence.ended:
                    kept += token_ids[at : at + plan.num_sampled]
                at += plan.num_sampled
            executor.settle(live, settlement, sampled_tokens(kept))
        executor.tell_drafting([plan for plan in live if executor.sequences.get(plan.sequence.slot) is plan.sequence])
        now_s = self._clock()
        # It was queued behind the step before, whose time isn't its own.
        duration_s = now_s - max(launched.began_s, self._last_landed_s)
        self._last_landed_s = now_s
        return settlement.outcome(duration_s)

    def _put_on_device(self, plans: list[RowPlan]) -> Pending | None:
        executor = self._executor
        rows = launched_rows(plans, executor.sequences.block_tables, executor.sequences.limits.block_size)
        try:
            pending = self._engine.launch(rows)
        except Exception as error:
            event(logger, "a step could not be launched", level=logging.ERROR, error=error)
            return None
        for plan in plans:
            plan.sequence.launched = plan.start + plan.num_known
            plan.sequence.awaited += plan.num_sampled
        return pending

    def _tokens_of(self, launched: Launched) -> list[int] | None:
        """None where the device failed or was never asked: then nothing is in flight any more."""
        if launched.pending is None:
            return None
        try:
            token_ids = launched.pending.token_ids()
        except Exception as error:
            event(logger, "the device failed on a launched step", level=logging.ERROR, error=error)
            for later in self._in_flight:
                later.wait()
                self._forget(later)
            self._forget(launched)
            return None
        for plan in launched.plans:
            plan.sequence.awaited -= plan.num_sampled
        return token_ids

    def _forget(self, launched: Launched) -> None:
        """As if it had never been launched."""
        if launched.pending is not None:
            for plan in launched.plans:
                plan.sequence.awaited -= plan.num_sampled
                plan.sequence.launched = 0
        launched.pending = None
