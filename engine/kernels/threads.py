"""How many threads the C++ kernels use, and on which cores."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from engine.kernels.build import NoKernels, library
from engine.progress import Progress

_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")
"""a container's share of time: microseconds (or "max") per period of microseconds"""


def allowed_cores() -> list[int]:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def default_threads() -> int:
    """One per core that this process may use, less one from three on: the network side needs a core as well."""
    num_cores = len(allowed_cores())
    limit = _cores_worth_of_time()
    if limit is not None:
        num_cores = min(num_cores, limit)
    return num_cores if num_cores <= 2 else num_cores - 1


def _cores_worth_of_time() -> int | None:
    """What a container is limited to, at least 1. More threads than that would all be stopped when it is used up."""
    try:
        quota, period = _CPU_LIMIT.read_text().split()
        return None if quota == "max" else max(1, int(quota) // int(period))
    except (OSError, ValueError):
        return None


def cores_to_pin(num_threads: int) -> list[int]:
    """One core per thread, or none.

    Threads are pinned only where somebody has already chosen this process's cores: on a machine that is shared freely
    the system knows better which cores are idle.
    """
    cores = allowed_cores()
    chosen = len(cores) < (os.cpu_count() or 1)
    return cores[:num_threads] if chosen and num_threads <= len(cores) else []


def use_threads(num_threads: int | None = None, progress: Progress | None = None) -> int:
    """Make the kernels use that many threads (None: the default) and return how many.

    The kernels are built first if need be, which is told to `progress`. Where there are none, nothing happens.
    """
    wanted = num_threads or default_threads()
    try:
        library(progress)
    except NoKernels:
        return wanted
    if wanted != torch.ops.tandem.num_threads():
        torch.ops.tandem.set_threads(wanted, cores_to_pin(wanted))
    return wanted
