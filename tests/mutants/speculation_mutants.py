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
        "self._enter(Phase.OFF, max(self._wait, min(int(cost), LONGEST_COSTLY_WAIT)))",
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
    Mutant(
        "dead-draft-worker-still-used",
        "worker/followed.py",
        "if self.ages[id(tail)] + 1 < MAX_COMMITS]",
        "]",
        ("tests/worker/test_tails.py",),
    ),
    Mutant(
        "wait-at-any-price",
        "worker/patience.py",
        "            if worth - tokens_per_s * delta > best:",
        "            if worth > best:",
        ("tests/worker/test_patience.py",),
    ),
    Mutant(
        "branch-shares-the-block-of-its-fork",
        "draft_worker/model_proposer.py",
        "min((branch.known - 1) // size, parent.computed // size)",
        "min(branch.known // size + 1, len(parent.block_ids))",
        ("tests/draft_worker/test_branching.py",),
    ),
    Mutant(
        "branch-survives-what-it-denies",
        "draft_worker/mirror.py",
        "            if branch is not best and branch._agreeing(token_ids) == len(token_ids) < len(branch.guess):",
        "            if branch is not best and len(token_ids) < len(branch.guess):",
        ("tests/draft_worker/test_branching.py",),
    ),
    Mutant(
        "run-ahead-before-the-waiting",
        "draft_worker/mirrors.py",
        "        if urgent:\n",
        "        if urgent and not any(mirror.wanted > 0 and not mirror.urgent for mirror in mirrors):\n",
        ("tests/draft_worker/test_mirrors.py",),
    ),
)
