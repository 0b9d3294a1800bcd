"""How many processor cores this process may count as its own."""

from __future__ import annotations

import math
import os

JOBS_AT_ONCE = "PROXY_ANCHOR_JOBS_AT_ONCE"  # set by a launcher: how many jobs share this host's cores


def usable_cores() -> int:
    """Those that it may use, or all (macOS, Windows)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def own_cores() -> int:
    """Its share of them, at least 1: they are divided among a host's ranks and a launcher's jobs."""
    return max(
        1, usable_cores() // math.prod(int(os.environ.get(each, "1")) for each in ("LOCAL_WORLD_SIZE", JOBS_AT_ONCE))
    )
