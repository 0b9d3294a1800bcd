"""One owner per run folder: a file lock that the system releases when the process ends, however it ends.

The lock of runs/NAME is the file runs/.NAME.lock, beside the folder: the folder holds the run's own files only, and removing
or renaming it does not free its name while a process still writes there. The file names its holder and is removed at the end.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from proxy_anchor.errors import FolderTaken
from proxy_anchor.utils import is_distributed

if TYPE_CHECKING:
    from filelock import BaseFileLock

HELD_BY_PARENT = "PROXY_ANCHOR_HELD_FOLDER"  # the folder that the process which started this one holds for both
WAIT_S = 1.0  # for a holder that is about to end
_held: dict[Path, BaseFileLock] = {}


def take(folder: Path, wait_s: float = WAIT_S) -> None:
    """Own this run folder until `release` or the end of the process; taken twice, it is released twice.

    Where the file system has no locks, goes on without one and says so on stderr.
    Raises FolderTaken, which names the holder, when another process owns it.
    """
    from filelock import FileLock, Timeout

    folder = folder.resolve()
    if os.environ.get(HELD_BY_PARENT) == str(folder):
        return
    file = lock_file(folder)
    file.parent.mkdir(parents=True, exist_ok=True)
    # No soft lock where flock is missing: after a kill it would still be there. No removal on release either: ours happens
    # while the lock is held, so that it cannot remove the file of the next holder.
    lock = _held.get(folder) or FileLock(
        file, thread_local=False, fallback_to_soft=False, preserve_lock_file=True, on_acquired=_sign
    )
    try:
        lock.acquire(timeout=wait_s)
    except Timeout:
        raise FolderTaken(
            f"{folder} is in use by {_holder(file)}: wait until that has ended, or choose another run=NAME."
        ) from None
    except OSError as error:  # no flock (ENOSYS, ENOLCK), or no file beside the folder (EACCES, EROFS)
        folder.mkdir(parents=True, exist_ok=True)  # where nothing can be made at all, that is the error
        print(
            f"warning: {file} cannot be locked ({error.strerror}): do not start a second command with this run folder.",
            file=sys.stderr,
            flush=True,
        )
        return
    _held[folder] = lock
    atexit.register(release, folder)  # not earlier: the library releases what it finds, and leaves the file


def release(folder: Path) -> None:
    """Give the folder back, if this process owns it."""
    folder = folder.resolve()
    if (lock := _held.get(folder)) is None:
        return
    if lock.lock_counter == 1:
        del _held[folder]
        with suppress(OSError):
            lock_file(folder).unlink()
    lock.release()


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Own this run folder within the block. No-op in one of several processes: `settings.resume_or_start` takes it for all."""
    if is_distributed():
        yield
        return
    take(folder)
    try:
        yield
    finally:
        release(folder)


def lock_file(folder: Path) -> Path:
    """Where the lock of this folder is."""
    return folder.with_name(f".{folder.name}.lock")


def _sign(descriptor: int) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)


def _holder(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8") or "another process"
    except OSError:
        return "another process"
