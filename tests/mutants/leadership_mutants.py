"""Planted faults of leadership, and of who follows it; see run.py."""

from __future__ import annotations

from mutant import Mutant

LEADERSHIP: tuple[Mutant, ...] = (
    Mutant(
        "standby-welcomes",
        "scheduler/servicer.py",
        "            self._leadership.require()\n        except errors.TandemError as error:",
        "            pass\n        except errors.TandemError as error:",
        ("tests/scheduler/test_leadership.py",),
    ),
    Mutant(
        "stale-leader-does-not-look",
        "scheduler/leadership.py",
        "            await self._ask()\n\n    async def watch",
        "            self._wake.set()\n\n    async def watch",
        ("tests/scheduler/test_leadership.py",),
    ),
    Mutant(
        "standby-faster-than-a-returning-leader",
        "scheduler/leadership.py",
        "elif held is None and asyncio.get_running_loop().time() < self._patient_until:",
        "elif False:",
        ("tests/scheduler/test_leadership.py",),
    ),
    Mutant(
        "old-leader-is-stayed-with",
        "cluster/leaders.py",
        "while (best := self.leader) is None or best[1] <= term:",
        "while (best := self.leader) is None or best[1] <= term + 10**6:",
        ("tests/cluster/test_leaders.py",),
    ),
    Mutant(
        "popular-prefix-buries-its-cell",
        "gateway/routing.py",
        "if cell.live < max(MIN_BOUND,",
        "if True or cell.live < max(MIN_BOUND,",
        ("tests/gateway/test_routing.py",),
    ),
    Mutant(
        "lost-cell-keeps-its-load",
        "gateway/cells.py",
        "                self._live[name] -= 1\n                self._table.renew(request)",
        "                self._table.renew(request)",
        ("tests/gateway/test_cells.py",),
    ),
)
