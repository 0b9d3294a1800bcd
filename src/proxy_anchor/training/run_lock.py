"""One process per run folder: a file lock, which the system releases when its process ends.

The lock of runs/NAME is the file runs/.NAME.lock. It is outside the folder, so that removing or renaming the folder
does not free its name while a process still writes there. The file names its holder and is removed at the end.
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

HELD_BY_PARENT = "PROXY_ANCHOR_HELD_FOLDER"  # the folder that the parent process holds for both
WAIT_S = 1.0  # seconds, for a holder that is about to end
_held: dict[Path, BaseFileLock] = {}


def take(folder: Path, wait_s: float = WAIT_S) -> None:
    """Lock this run folder until `release` or the end of the process. Locked twice, it is released twice.

    Without locks in the file system it warns on stderr and continues.
    Raises FolderTaken, naming the holder, where another process has the lock.
    """
    from filelock import FileLock, Timeout

    folder = folder.resolve()
    if os.environ.get(HELD_BY_PARENT) == str(folder):
        return
    file = lock_file(folder)
    file.parent.mkdir(parents=True, exist_ok=True)
    # A soft lock (without flock) would outlive a kill. The library would remove the file after the release, and with it
    # perhaps that of the next holder; `release` removes it before.
    lock = _held.get(folder) or FileLock(
        file, thread_local=False, fallback_to_soft=False, preserve_lock_file=True, on_acquired=_sign
    )
    try:
        lock.acquire(timeout=wait_s)
    except Timeout:
        raise FolderTaken(
            f"{folder} is in use by {_holder(file)}: wait until that has ended, or choose another run=NAME."
        ) from None
    except OSError as error:  # no flock (ENOSYS, ENOLCK), or the file cannot be made (EACCES, EROFS)
        folder.mkdir(parents=True, exist_ok=True)  # raises where nothing can be written at all
        print(
            f"warning: {file} cannot be locked ({error.strerror}): do not start a second command with this run folder.",
            file=sys.stderr,
            flush=True,
        )
        return
    _held[folder] = lock
    atexit.register(release, folder)  # after the library's own, which leaves the file


def release(folder: Path) -> None:
    """Release the lock, if this process has it."""
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
    """Lock this run folder within the block. No-op in one of several ranks: `resume_or_start` locks it for all."""
    if is_distributed():
        yield
        return
    take(folder)
    try:
        yield
    finally:
        release(folder)


def lock_file(folder: Path) -> Path:
    """The lock file of this folder."""
    return folder.with_name(f".{folder.name}.lock")


def _sign(descriptor: int) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)


def _holder(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8") or "another process"
    except OSError:
        return "another process"
