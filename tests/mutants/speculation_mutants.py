"""Planted faults of the draft budget; see run.py."""

from __future__ import annotations

from mutant import Mutant

SPECULATION: tuple[Mutant, ...] = (
    Mutant(
        "draft-cost-forgotten",
        "scheduler/core/budget.py",
        "        size += availability\n",
        "",
        ("tests/scheduler/core/test_budget.py",),
    ),
    Mutant(
        "plateau-ends-the-search",
        "scheduler/core/budget.py",
        "            best, best_count = rate, count\n",
        "            best, best_count = rate, count\n        else:\n            break\n",
        ("tests/scheduler/core/test_budget.py",),
    ),
    Mutant(
        "longer-steps-may-be-faster",
        "scheduler/core/step_time.py",
        "while pools and pools[-1][0] > pool[0]:",
        "while pools and pools[-1][0] > 2 * pool[0]:",
        ("tests/scheduler/core/test_step_time.py",),
    ),
    Mutant(
        "outliers-believed",
        "scheduler/core/step_time.py",
        "ordered[count // 2] if",
        "ordered[-1] if",
        ("tests/scheduler/core/test_step_time.py",),
    ),
    Mutant(
        "acceptance-behind-a-miss",
        "scheduler/core/acceptance.py",
        "        tried = min(drafted, accepted + 1)\n        while len(self._tries) < tried:",
        "        tried = drafted\n        while len(self._tries) < tried:",
        ("tests/scheduler/core/test_acceptance.py",),
    ),
    Mutant(
        "contention-unseen",
        "scheduler/core/speculation.py",
        "            if drafted:\n                self.drafting_times.observe",
        "            if drafted:\n                self.plain_times.observe",
        ("tests/scheduler/core/test_speculation.py",),
    ),
    Mutant(
        "never-probed-again",
        "scheduler/core/speculation.py",
        "self._enter(Phase.OFF, self._wait)",
        "self._enter(Phase.OFF, 10**9)",
        ("tests/scheduler/core/test_speculation.py",),
    ),
    Mutant(
        "fewer-rows-unnoticed",
        "scheduler/core/speculation.py",
        "fewer = num_rows < 0.9 * self._looked_at_rows",
        "fewer = False",
        ("tests/scheduler/core/test_speculation.py",),
    ),
    Mutant(
        "drafts-beyond-the-last-token",
        "scheduler/core/speculation.py",
        "sequence.sampling_in_flight - 1  #",
        "sequence.sampling_in_flight  #",
        ("tests/scheduler/core/test_speculation.py",),
    ),
    Mutant(
        "rising-budget-opens-anew",
        "worker/tails.py",
        "max(max_draft_tokens, self.longest_draft)",
        "max_draft_tokens",
        ("tests/worker/test_tails.py",),
    ),
)
