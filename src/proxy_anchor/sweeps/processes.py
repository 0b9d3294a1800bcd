"""One command as several processes of one host, each with its rank in the environment; ends them all when one fails."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from proxy_anchor.errors import STOPPED, UsageError
from proxy_anchor.utils import NOTICES

ERROR_FILE = "PROXY_ANCHOR_ERROR_FILE"  # where a rank leaves an error that a user can repair
GRACE_S = 20.0  # from the first failure until the others, which may wait for it for ever, are ended


class RankError(RuntimeError):
    """A process ended by something that is no user's error; what it had to say stands on stderr."""


def run_ranks(command: Sequence[str], num_ranks: int, environment: Mapping[str, str] | None = None) -> None:
    """Run the command num_ranks times at once and wait for all.

    Each finds RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, NODE_RANK, MASTER_ADDR and MASTER_PORT in its environment, as
    torchrun sets them, and `environment`. SIGTERM and SIGUSR1 are passed on to all, which end when they have written what
    they have. No process is left running when this returns or raises.

    Raises UsageError with what a rank left by `leave_error`, SystemExit(STOPPED) after a signal, or RankError that names the
    rank which failed first.
    """
    with TemporaryDirectory() as folder:
        errors = [Path(folder) / f"rank{each}" for each in range(num_ranks)]
        shared = {
            **os.environ,
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "NODE_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            **(environment or {}),
        }
        processes: list[subprocess.Popen] = []
        with _collected_signals() as received:
            try:
                for number, file in enumerate(errors):
                    own = {"RANK": str(number), "LOCAL_RANK": str(number), ERROR_FILE: str(file)}
                    processes.append(
                        subprocess.Popen(command, env={**shared, **own}, preexec_fn=end_with_parent if PRCTL else None)
                    )
                stopped, failed = _wait(processes, received)
            except BaseException:
                end_processes(processes, signal.SIGINT)  # on which they write what they have
                raise
            finally:
                end_processes(processes, signal.SIGKILL)
        for file in errors:
            if file.exists():
                raise UsageError(file.read_text(encoding="utf-8"))
        if failed is not None:
            code = processes[failed].returncode
            if stopped or code == STOPPED:
                raise SystemExit(STOPPED)
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            raise RankError(f"process {failed} of {num_ranks} {how}; its messages stand above, and all were ended.")


def leave_error(text: str) -> bool:
    """Hand an error that a user can repair to `run_ranks`, which reports it once; False if it did not start this process."""
    if ERROR_FILE not in os.environ:
        return False
    Path(os.environ[ERROR_FILE]).write_text(text, encoding="utf-8")
    return True


def left_by_others() -> bool:
    """Whether another process that `run_ranks` started has left such an error: what this one met, alone, follows from it."""
    own = Path(os.environ[ERROR_FILE]) if ERROR_FILE in os.environ else None
    return own is not None and any(each != own for each in own.parent.glob("rank*"))


PRCTL = ctypes.PyDLL(None).prctl if sys.platform == "linux" else None


def end_with_parent() -> None:
    """For `preexec_fn`: have the system kill this process when the thread that started it is gone, killed without a chance
    to end it. It would go on in a folder in which the same command, given again, works too.
    """
    if PRCTL is not None:
        PRCTL(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG, of linux/prctl.h


def _wait(processes: Sequence[subprocess.Popen], received: list[int]) -> tuple[bool, int | None]:
    """(whether a signal was passed on, the rank that failed first or None), when all have ended or a little after a failure.

    One that stopped by a signal is no failure: the first is still writing then.
    """

    def first_failed(*fine: int | None) -> int | None:
        return next((n for n, each in enumerate(processes) if each.poll() not in (None, 0, *fine)), None)

    stopped = False
    failed: int | None = None
    deadline = float("inf")
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        while received:
            number, stopped = received.pop(0), True
            for process in processes:
                process.send_signal(number)  # nothing is sent to one that has ended
        if failed is None and (failed := first_failed(STOPPED)) is not None:
            deadline = time.monotonic() + GRACE_S
        time.sleep(0.05)
    failed = first_failed(STOPPED) if failed is None else failed
    return stopped, first_failed() if failed is None else failed


@contextmanager
def _collected_signals() -> Iterator[list[int]]:
    """SIGTERM and SIGUSR1 that arrive are put into the list, in the main thread: it alone may say what a signal does."""
    received: list[int] = []
    before: dict[int, Any] = {}
    try:
        for number in NOTICES:
            before[number] = signal.signal(number, lambda number, frame: received.append(number))
    except ValueError:
        pass
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_processes(processes: Sequence[subprocess.Popen], sign: int) -> None:
    """Send the signal to those that still run, and wait for them, GRACE_S at most."""
    for process in processes:
        if process.poll() is None:
            process.send_signal(sign)
    deadline = time.monotonic() + GRACE_S
    for process in processes:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            continue


@contextmanager
def terminated_as(error: BaseException) -> Iterator[None]:
    """A scheduler's SIGTERM raises this error, so that the processes are ended too."""

    def stop(*_: Any) -> None:
        raise error

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not the main thread, which alone may say what a signal does
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
