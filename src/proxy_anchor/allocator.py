"""What a process does with memory: what it asks the system for on a CPU, and how often Python looks for what is unused."""

from __future__ import annotations

import atexit
import ctypes
import gc
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


def look_for_garbage_less_often() -> None:
    """For commands: Python goes through all objects again and again while they are being made, and once more before it ends.

    That is a third of the time that importing Lightning and ending take (docs/speed.md). What is in no cycle of references is freed
    at once, as ever.
    """
    gc.set_threshold(20_000, 10, 10)
    atexit.register(gc.freeze)  # registered before others, called after them
