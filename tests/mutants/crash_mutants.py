"""Planted faults in what happens when workers die, hang, lie or drain; see run.py."""

from __future__ import annotations

from mutant import Mutant

CORE = ("tests/scheduler/core/test_scenarios.py", "tests/scheduler/core/test_lost_workers.py")
CELL = ("tests/scheduler/test_crashes.py",)
GATEWAY = ("tests/gateway/test_resubmission.py",)

CRASHES: tuple[Mutant, ...] = (
    Mutant(
        "crashes-not-told",
        "scheduler/convert.py",
        "        message.crashes = sequence.crashes\n",
        "        pass\n",
        CELL,
    ),
    Mutant(
        "crashes-not-resubmitted",
        "gateway/convert.py",
        "        crashes=live.crashes,\n",
        "",
        GATEWAY,
    ),
    Mutant(
        "a-token-does-not-acquit",
        "gateway/requests.py",
        "                self._crashes.pop(news.choice, None)\n",
        "                pass\n",
        GATEWAY,
    ),
    Mutant(
        "finished-choices-still-count",
        "gateway/requests.py",
        "running = (choice.index for choice in self.choices if choice.finish is None)",
        "running = (choice.index for choice in self.choices)",
        GATEWAY,
    ),
    Mutant(
        "crashes-lost-in-a-take-over",
        "scheduler/gateways.py",
        "        crashes = self._core.crashes_of(held.key)\n",
        "        crashes = 0\n",
        CELL,
    ),
    Mutant(
        "tried-again-where-it-crashed",
        "scheduler/core/placement.py",
        "        if sequence.crashed_on == worker.worker_id:\n",
        "        if False:\n",
        (*CORE, *CELL),
    ),
    Mutant(
        "a-worker-cut-off-has-crashed",
        "scheduler/loop.py",
        'self.detach(link, crashed=False, why="it was cut off, or stood still")',
        'self.detach(link, crashed=True, why="it was cut off, or stood still")',
        CELL,
    ),
    Mutant(
        "what-was-under-way-hides-a-cut",
        "scheduler/workers.py",
        "            self._silent_until = now\n",
        "            pass\n",
        CELL,
    ),
    Mutant(
        "an-end-that-looks-orderly-is-no-crash",
        "scheduler/loop.py",
        "        if link.leaving or link.draining:\n",
        "        if True:\n",
        CELL,
    ),
    Mutant(
        "a-slow-old-leader-sees-a-crash",
        "worker/attachment.py",
        "                await asyncio.wait([reading])\n",
        "",
        ("tests/worker/test_leaving.py",),
    ),
    Mutant(
        "a-leader-that-is-left-has-a-say",
        "worker/attachment.py",
        "            if call is not self._call:\n",
        "            if False:\n",
        ("tests/worker/test_leaving.py",),
    ),
    Mutant(
        "a-call-kept-by-its-error",
        "cluster/channel.py",
        "        del part\n",
        "        pass\n",
        ("tests/cluster/test_abandon.py",),
    ),
    Mutant(
        "a-hang-is-no-crash",
        "scheduler/loop.py",
        'self.detach(link, crashed=True, why=f"its step',
        'self.detach(link, crashed=False, why=f"its step',
        CELL,
    ),
    Mutant(
        "a-result-is-no-progress",
        "scheduler/workers.py",
        "        if goes_on:\n            self.progress.began(now)\n",
        "        if goes_on:\n            pass\n",
        CELL,
    ),
    Mutant(
        "ids-beyond-the-vocabulary-pass",
        "scheduler/core/applier.py",
        "max(outcome.token_ids) >= vocab_size",
        "max(outcome.token_ids) > vocab_size",
        CELL,
    ),
    Mutant(
        "a-draining-worker-abandons-what-has-started",
        "scheduler/core/placement.py",
        "    return serving if serving or not sequence.request.started else large\n",
        "    return serving\n",
        CORE,
    ),
    Mutant(
        "a-draining-worker-takes-new-requests",
        "scheduler/core/placement.py",
        "    return serving if serving or not sequence.request.started else large\n",
        "    return serving or large\n",
        CORE,
    ),
    Mutant(
        "drained-before-what-waits-for-it",
        "scheduler/core/scheduler.py",
        "        return not any(worker in takers(sequence, pool.workers.values()) for sequence in pool.waiting)\n",
        "        return True\n",
        CORE,
    ),
    Mutant(
        "any-cell-will-do",
        "scheduler/convert.py",
        "    if meant and meant != own:\n",
        "    if False:\n",
        ("tests/scheduler/test_service.py",),
    ),
)
