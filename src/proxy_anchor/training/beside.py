"""Threads that only make something ready, and may be given up at any time."""

from __future__ import annotations

import atexit
import time
from collections.abc import Generator
from contextlib import closing, suppress
from threading import Event, Thread
from weakref import WeakSet

_WAIT_S = 10.0  # for all of them, when Python ends: a card that does not answer holds nobody for ever

_ENDING = Event()
_THREADS: WeakSet[Thread] = WeakSet()


def run_beside(work: Generator[None]) -> Thread:
    """Run a generator, a step of it after another, in a thread that says nothing if it fails: whoever needs what it makes
    ready makes it, or says why not.

    When Python ends, the step that runs is waited for and no other is begun: a thread that returned from torch's C++ later
    would have the process aborted, whatever its exit code was to be.
    """

    def run() -> None:
        # Exceptions of torch's own are meant too; a trace on stderr would look like the run's.
        with suppress(Exception), closing(work):
            for _ in work:
                if _ENDING.is_set():
                    return

    thread = Thread(target=run, daemon=True)
    _THREADS.add(thread)
    thread.start()
    return thread


@atexit.register
def _end() -> None:
    _ENDING.set()
    deadline = time.monotonic() + _WAIT_S
    for thread in list(_THREADS):
        thread.join(max(0.0, deadline - time.monotonic()))
