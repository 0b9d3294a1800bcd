"""What a process asks the system for on a CPU."""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def keep_freed_memory() -> bool:
    """Let the C library keep what tensors free for the next tensors, instead of giving it back to the system.

    By default glibc maps every large block anew and unmaps it when it is freed, so that each layer of a network writes to
    pages that the system first has to find and clear: on a CPU that costs more than the layer. The process then holds its
    peak of memory until it ends. Returns whether it was done: only with glibc (Linux).
    """
    if not sys.platform.startswith("linux"):
        return False
    with suppress(OSError, AttributeError):  # another C library (musl) has no mallopt
        mallopt = ctypes.CDLL(None).mallopt
        return bool(mallopt(_M_MMAP_THRESHOLD, 2**30)) and bool(mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))
    return False
