"""Planted faults of streams and what counts their tokens; see run.py."""

from __future__ import annotations

from mutant import Mutant

STREAMS: tuple[Mutant, ...] = (
    Mutant(
        "late-news-are-never-sent",
        "cluster/outgoing.py",
        "            if self._steps is not None:\n                self._resume_later()\n",
        "            if self._steps is not None:\n                pass\n",
        ("tests/cluster/test_outgoing.py",),
    ),
    Mutant(
        "a-streams-error-keeps-its-call",
        "cluster/outgoing.py",
        "            del error  #",
        "            pass  #",
        ("tests/cluster/test_outgoing.py",),
    ),
    Mutant(
        "gaps-on-a-bound-count-as-above",
        "gateway/metrics.py",
        "from bisect import bisect_left\n",
        "from bisect import bisect as bisect_left\n",
        ("tests/gateway/test_metrics.py",),
    ),
)
