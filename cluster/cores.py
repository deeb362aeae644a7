"""Which processor cores this process runs on, by name: processes with equal names take each other's time."""

from __future__ import annotations

import os
import platform
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""the same in all containers of a host"""


def own_cores() -> str:
    """The host, and which of its cores may be used. Processes that are pinned apart have different names."""
    try:
        host = _BOOT_ID.read_text("ascii").strip()
    except OSError:
        host = platform.node()
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else ["all"]
    return f"{host} {','.join(map(str, cores))}"
