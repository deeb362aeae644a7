"""The planted faults; see run.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One fault: in `file`, `old` (found exactly once) becomes `new`, and one of `tests` must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


CORE = ("tests/scheduler",)

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "reservation-off-by-one",
        "scheduler/core/planner.py",
        "horizon = sequence.horizon + 1 + k\n",
        "horizon = sequence.horizon + k\n",
        CORE,
    ),
    Mutant(
        "in-flight-step-forgotten",
        "scheduler/core/applier.py",
        "sequence.horizon += count - reserved\n",
        "sequence.horizon = len(sequence.token_ids) + count\n",
        CORE,
    ),
    Mutant(
        "release-dropped",
        "scheduler/core/planner.py",
        "        step.released_slots.extend(worker.released_slots)\n",
        "",
        CORE,
    ),
    Mutant(
        "blocks-returned-too-early",
        "scheduler/core/scheduler.py",
        "        worker.leave(sequence)\n        sequence.move(State.LEAVING)\n        if sequence.in_flight == 0:\n",
        "        worker.leave(sequence)\n        sequence.move(State.LEAVING)\n        if sequence.in_flight < 2:\n",
        CORE,
    ),
    Mutant(
        "prefix-hit-covers-last-token",
        "scheduler/core/block_tables.py",
        "max_blocks = (len(sequence.token_ids) - 1) // pool.block_size",
        "max_blocks = len(sequence.token_ids) // pool.block_size",
        CORE,
    ),
    Mutant(
        "salt-ignored",
        "scheduler/core/prefix_cache.py",
        'f"{len(model)}:{model}{salt}"',
        'f"{len(model)}:{model}"',
        CORE,
    ),
    Mutant(
        "hash-of-uncomputed-block",
        "scheduler/core/applier.py",
        "sequence.computed = first + count - 1\n",
        "sequence.computed = first + count\n",
        CORE,
    ),
    Mutant(
        "tokens-of-cancelled-delivered",
        "scheduler/core/applier.py",
        "if state is State.RUNNING or state is State.LEAVING:",
        "if True:",
        CORE,
    ),
    Mutant(
        "old-epoch-accepted",
        "scheduler/loop.py",
        "(message.term, message.epoch) != (self.term, link.epoch)",
        "message.term != self.term",
        CORE,
    ),
    Mutant(
        "preempted-tokens-lost",
        "scheduler/core/applier.py",
        "                known += new\n",
        "                if state is State.RUNNING:\n                    known += new\n",
        CORE,
    ),
    Mutant(
        "eviction-keeps-the-name",
        "scheduler/core/block_pool.py",
        "                self.cache.forget(block)\n",
        "",
        CORE,
    ),
    Mutant(
        "newest-first-fairness",
        "scheduler/core/queue.py",
        "            level.clients.move_to_end(client)\n",
        "            level.clients.move_to_end(client, last=False)\n",
        CORE,
    ),
)
