"""Which processor cores this process runs on, by name: processes on the same ones take each other's time."""

from __future__ import annotations

import os
import platform
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""the same in all containers of a host"""


def own_cores() -> str:
    """The host, and which of its cores may be used, as they are when this is called."""
    try:
        host = _BOOT_ID.read_text("ascii").strip()
    except OSError:
        host = platform.node()
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else ["all"]
    return f"{host} {','.join(map(str, cores))}"


def share_cores(one: str, other: str) -> bool:
    """Whether two such names have a core in common; an empty one has none."""
    host, _, cores = one.partition(" ")
    other_host, _, others = other.partition(" ")
    return bool(host) and host == other_host and not set(cores.split(",")).isdisjoint(others.split(","))
